"""The model's most probable tokens after token pairs and single tokens, from when it last scored
them.

After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", arXiv:2408.08696, which keeps single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

#: Number of successors kept per pair and per token.
NUM_SUCCESSORS = 2
#: Maximum number of pairs, some 300 bytes each, while a text is read: above it, the eighth of them
#: that was learned first is dropped.
MAX_PAIRS = 200_000
_NONE: list[int] = []


class Successors:
    """The `NUM_SUCCESSORS` most probable successors, by token pair and by single token."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], list[int]] = {}
        self._singles: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, before: int, last: int, top_tokens: list[int]) -> None:
        """Store the most probable tokens after `last`, which the model scored after `before`."""
        self._pairs[before, last] = self._singles[last] = top_tokens
        if len(self._pairs) > MAX_PAIRS:
            self.limit(MAX_PAIRS - MAX_PAIRS // 8)

    def limit(self, count: int) -> None:
        """Forget the pairs that were learned first, up to the last `count`, and as many single
        tokens."""
        for pair in list(islice(self._pairs, max(0, len(self._pairs) - count))):
            del self._pairs[pair]
        for token in list(islice(self._singles, max(0, len(self._singles) - count))):
            del self._singles[token]

    def find(self, before: int, last: int) -> tuple[int, list[int]]:
        """The successors of the pair, else of the single token.

        Returns:
            The index of the first one's rate, and the successors. Rates are ordered: those of pairs
                first, then those of single tokens.
        """
        successors = self._pairs.get((before, last))
        if successors is not None:
            return 0, successors
        return NUM_SUCCESSORS, self._singles.get(last, _NONE)

    def outcomes(self, before: int, last: int, token: int) -> Iterable[tuple[int, bool]]:
        """For each successor that was predicted, the index of its rate and whether it equals
        `token`.
        """
        first, successors = self.find(before, last)
        return [(first + rank, other == token) for rank, other in enumerate(successors)]
