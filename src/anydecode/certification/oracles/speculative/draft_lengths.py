"""What the oracle tests of draft lengths share: fixed costs of passes, and drafts copied from the
text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anydecode.engine.engine import Engine
from anydecode.scoring.cost import CostModel


@dataclass
class FixedCosts(CostModel):
    """A cost model in which a pass takes `cost(rows, context)` seconds, beside `others` other
    sequences."""

    cost: Callable[[int, int], float]
    others: int = 0

    def seconds(self, rows: int, context: int) -> float:
        """The duration of a pass."""
        return self.cost(rows, context)

    def num_others(self) -> int:
        """The number of other sequences."""
        return self.others

    def host_seconds(self, num_sequences: int) -> float:
        """What a step takes beside its pass: nothing."""
        return 0.0


class LoadedCosts(FixedCosts):
    """A cost model in which a pass takes 1 + `per_row` * (rows - 1) seconds, beside the other
    sequences of `engine`."""

    def __init__(self, engine: Engine, per_row: float) -> None:
        super().__init__(lambda rows, context: 1 + per_row * (rows - 1))
        self.engine = engine

    def num_others(self) -> int:
        """The number of other running sequences."""
        return max(0, len(self.engine.running) - 1)


def latest_copy(text: list[int], count: int) -> list[int]:
    """The `count` tokens that followed the latest occurrence of the longest repeated suffix of up
    to three tokens."""
    for n in (3, 2, 1):
        for start in range(len(text) - n - 1, -1, -1):
            if n < len(text) and text[start : start + n] == text[-n:]:
                return text[start + n : start + n + count]
    return []
