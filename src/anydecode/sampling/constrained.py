"""Constraints as a logits processor of the sampler."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor


class ConstraintState(Protocol):
    """The state of a constraint (grammar matcher) at one point of the text."""

    def mask(self) -> np.ndarray | None:
        """The allowed next tokens: boolean `[vocab_size]`, or int ids, ascending; None for all."""
        ...

    def advance(self, token: int) -> None:
        """Append `token`."""
        ...

    def fork(self) -> ConstraintState:
        """A copy for a branch of the text."""
        ...


class Constrained(LogitsProcessor):
    """Keeps the candidates that the constraint allows."""

    is_stateful = True

    def __init__(self, state: ConstraintState) -> None:
        self.state = state

    def allows(self, token: int) -> bool:
        """Whether `token` may come next. Uses the state's own `allows` if it has one, which needs
        no mask."""
        allows = getattr(self.state, "allows", None)
        if allows is not None:
            return bool(allows(token))
        mask = self.state.mask()
        if mask is None:
            return True
        return bool(mask[token]) if mask.dtype == np.bool_ else token in mask

    def forbids_little(self) -> bool:
        """Whether most of the vocabulary is allowed next."""
        mask = self.state.mask()
        return mask is None or (
            mask.dtype == np.bool_ and 2 * int(np.count_nonzero(mask)) > len(mask)
        )

    def apply(self, candidates: Candidates) -> Candidates:
        kept = self._kept(candidates, self.state.mask())
        unforced = getattr(self.state, "unforced", None)
        if unforced is not None and len(kept) == 1 and kept.scores[0] == -np.inf:
            return self.unforced(candidates)  # the shortest completion is banned
        return kept

    @property
    def is_completing(self) -> bool:
        """Whether the mask allows a forced completion only."""
        return bool(getattr(self.state, "is_completing", False))

    def unforced(self, candidates: Candidates) -> Candidates:
        """The candidates that the state without the forced completion allows."""
        state: Any = self.state
        return self._kept(candidates, state.unforced.mask())

    def fits(self, token: int, num_tried: int) -> bool:
        """Whether a completion fits behind `token`, one of the `unforced` candidates."""
        state: Any = self.state
        return bool(state.fits(token, num_tried))

    def _kept(self, candidates: Candidates, mask: np.ndarray | None) -> Candidates:
        """The candidates that `mask` allows."""
        if mask is None:
            return candidates
        if mask.dtype == np.bool_ and candidates.tokens is None:
            count = int(np.count_nonzero(mask[: len(candidates)]))
            if 2 * count > len(candidates):  # masking a few is cheaper than gathering many
                return self._without_few(candidates, mask[: len(candidates)], count)
        if mask.dtype == np.bool_:
            allowed = mask if candidates.tokens is None else mask[candidates.tokens]
            index = np.flatnonzero(allowed[: len(candidates)])
        else:
            index, _ = candidates.positions(mask)
        if not len(index):
            raise ConstraintError(
                "the constraint allows none of the tokens that the other rules allow here"
            )
        return candidates if len(index) == len(candidates) else candidates.keep(index)

    @staticmethod
    def _without_few(candidates: Candidates, mask: np.ndarray, count: int) -> Candidates:
        if count == len(candidates):
            return candidates
        scores = np.where(mask, candidates.scores, np.float32(-np.inf))
        return Candidates(None, scores, owned=True)

    def advance(self, token: int) -> None:
        self.state.advance(token)

    def prepare(self) -> None:
        prepare = getattr(self.state, "prepare", None)
        if prepare is not None:
            prepare()

    def fork(self) -> Constrained:
        return Constrained(self.state.fork())
