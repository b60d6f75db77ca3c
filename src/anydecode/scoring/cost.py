"""What a pass costs: seconds by number of rows and length of context. Plain data, and a guess for
models that nobody has measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: What one more row costs where nothing was measured, in passes of one row.
GUESSED_ROW = 0.1


class Pace(Protocol):
    """What a decoder may ask about the engine it runs in."""

    def seconds(self, rows: int, context: int) -> float:
        """What a pass over that many rows behind `context` positions costs."""
        ...

    def others(self) -> int:
        """How many other sequences are running now; each adds about a row to every pass."""
        ...


@dataclass(frozen=True)
class CostTable:
    """`seconds_by[context][n]`: a pass of n rows. Between measured points costs are interpolated,
    beyond them the last slope goes on; they never fall with n."""

    seconds_by: Mapping[int, Mapping[int, float]]
    _lines: list[tuple[int, list[int], list[float]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.seconds_by or any(len(line) < 2 for line in self.seconds_by.values()):
            raise ValueError("a cost table needs at least two numbers of rows per context")
        lines = []
        for context in sorted(self.seconds_by):
            counts = sorted(self.seconds_by[context])
            costs, highest = [], 0.0
            for count in counts:
                highest = max(highest, self.seconds_by[context][count])
                costs.append(highest)
            lines.append((context, counts, costs))
        object.__setattr__(self, "_lines", lines)

    def seconds(self, rows: int, context: int) -> float:
        """The cost of a pass over `rows` rows, each seeing about `context` positions."""
        lines = self._lines
        if len(lines) == 1:
            return _along(rows, lines[0][1], lines[0][2])
        place = min(max(bisect_right([line[0] for line in lines], context), 1), len(lines) - 1)
        (low, *below), (high, *above) = lines[place - 1], lines[place]
        left, right = _along(rows, *below), _along(rows, *above)
        return max(left + (right - left) * (max(context, low) - low) / (high - low), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """`{"rows": [{"n": 1, "context": 256, "seconds": ...}, ...]}`"""
        return {
            "rows": [
                {"n": n, "context": context, "seconds": seconds}
                for context, line in sorted(self.seconds_by.items())
                for n, seconds in sorted(line.items())
            ]
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CostTable:
        """The table of a `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        found: dict[int, dict[int, float]] = {}
        for row in data["rows"]:
            found.setdefault(int(row["context"]), {})[int(row["n"])] = float(row["seconds"])
        return CostTable(found)


def guessed(unit: float = 1.0) -> CostTable:
    """Costs where nothing was measured: each further row a tenth of the first."""
    return CostTable({0: {1: unit, 2: unit * (1 + GUESSED_ROW)}})


def _along(rows: int, counts: list[int], costs: list[float]) -> float:
    place = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
    low, high = counts[place - 1], counts[place]
    slope = (costs[place] - costs[place - 1]) / (high - low)
    return costs[place - 1] + slope * (rows - low)
