"""What a model thought likeliest behind tokens and pairs of tokens when it scored them last.

After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", arXiv:2408.08696, which keeps single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

#: How many successors are kept of each.
WIDTH = 2
_NONE: list[int] = []


class Successors:
    """The `WIDTH` likeliest successors, by pair and by single token."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], list[int]] = {}
        self._singles: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, before: int, last: int, likeliest: list[int]) -> None:
        """A model scored `last`, which stood behind `before`."""
        self._pairs[before, last] = self._singles[last] = likeliest

    def find(self, before: int, last: int) -> tuple[int, list[int]]:
        """Successors of the pair, else of the token; and where their first rate stands among
        those of `Rates`: the pair's come first."""
        found = self._pairs.get((before, last))
        if found is not None:
            return 0, found
        return WIDTH, self._singles.get(last, _NONE)

    def notes(self, before: int, last: int, token: int) -> Iterable[tuple[int, bool]]:
        """`token` followed: which rates that speaks for, and which against."""
        first, found = self.find(before, last)
        return [(first + rank, guess == token) for rank, guess in enumerate(found)]
