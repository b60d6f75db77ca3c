"""The caller's prediction of an answer, which decoders may draft from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from anydecode.scoring.tree import ROOT, TokenTree

#: Number of tokens at the end of the prompt by which the beginning of the prediction is found.
CONTEXT = 20


@dataclass(eq=False)
class Prediction:
    """A predicted answer, and how many drafted tokens of it were right.

    A drafted token is one of the prediction if the prediction has it behind the same two tokens.

    Args:
        prompt: Token ids of the prompt.
        tokens: Token ids of the predicted answer.

    Attributes:
        num_accepted: Number of drafted tokens of the prediction that were accepted.
        num_rejected: Number of those that were rejected.
    """

    prompt: list[int]
    tokens: list[int]
    num_accepted: int = field(default=0, init=False)
    num_rejected: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        text = self.history
        self._ngrams = set(zip(text, text[1:], text[2:], strict=False))

    @property
    def history(self) -> list[int]:
        """The end of the prompt and the predicted answer."""
        return [*self.prompt[-CONTEXT:], *self.tokens]

    def record(self, text_end: Seq[int], tree: TokenTree, accepted: Seq[int]) -> None:
        """Count the tokens of a verified draft.

        Args:
            text_end: The two tokens before the draft.
            tree: The draft.
            accepted: The nodes whose tokens were emitted.
        """
        pairs = {ROOT: tuple(text_end)}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            pairs[node] = (*pairs[parent][-1:], token)
            if (*pairs[parent], token) not in self._ngrams:
                continue
            if node in accepted:
                self.num_accepted += 1
            else:
                self.num_rejected += 1
