"""How much the requests of an engine may draft: what decoders ask before and after they draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from anydecode.scoring.cost import CostModel
from anydecode.scoring.tree import TokenTree


class DraftedSequence(Protocol):
    """What a policy reads of a sequence."""

    cost_model: CostModel

    @property
    def length(self) -> int:
        """Number of prompt and generated tokens."""
        ...


class DraftShare(Protocol):
    """What one request may draft."""

    def size(self, own: int, can_burst: bool = False) -> int:
        """The maximum number of drafts of the next round.

        Args:
            own: That of the request's method.
            can_burst: Whether, without drafts, several tokens are generated in one call.
        """
        ...

    def chances(self, tree: TokenTree) -> Seq[float]:
        """The probability of each node of a draft to be accepted, which is not above that of its
        parent, if a pass may leave out nodes that save no time in it; empty: it has them all."""
        ...

    def observe(
        self, tree: TokenTree, path: Seq[int], seconds: float, is_whole: bool = False
    ) -> None:
        """Called after each round with what was verified.

        Args:
            tree: The verified draft; empty if there was none.
            path: Its accepted nodes.
            seconds: The time that drafting took.
            is_whole: Whether no pass may leave out nodes of such a draft.
        """
        ...

    def close(self) -> None:
        """Called when the request ends, or its decoding stops."""
        ...


class DraftPolicy(Protocol):
    """Limits how much all requests of an engine together draft."""

    def open(self, sequence: DraftedSequence, source: object) -> DraftShare:
        """The share of a request, whose drafts are as likely to be accepted as others of
        `source`."""
        ...


class OwnDrafts:
    """No limit: each request drafts as much as its method says, and each pass has all of it."""

    def open(self, sequence: DraftedSequence, source: object) -> DraftShare:
        return self

    def size(self, own: int, can_burst: bool = False) -> int:
        return own

    def chances(self, tree: TokenTree) -> Seq[float]:
        return ()

    def observe(
        self, tree: TokenTree, path: Seq[int], seconds: float, is_whole: bool = False
    ) -> None:
        pass

    def close(self) -> None:
        pass


OWN_DRAFTS = OwnDrafts()
