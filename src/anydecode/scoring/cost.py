"""What a pass costs: seconds by number of rows and length of context. Plain data, and a guess for
models that nobody has measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, Protocol

#: What one more row costs where nothing was measured, in passes of one row.
DEFAULT_ROW_COST = 0.1


class CostModel(Protocol):
    """What a decoder may ask about the engine it runs in."""

    def seconds(self, rows: int, context: int) -> float:
        """What a pass over that many rows behind `context` positions costs."""
        ...

    def num_others(self) -> int:
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
        position = min(max(bisect_right([line[0] for line in lines], context), 1), len(lines) - 1)
        low, counts, costs = lines[position - 1]
        high, more_counts, more_costs = lines[position]
        left, right = _along(rows, counts, costs), _along(rows, more_counts, more_costs)
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


class CostCorrection:
    """Factors that bring a table closer to the passes really seen: one for how fast the machine is
    now, times one for the number of rows' order of magnitude. The first moves `common` of the way,
    so that sizes which are rarely run keep up with those that always are. A table measured while
    the machine was busy mends itself this way."""

    def __init__(self, learning: float = 0.05, common: float = 0.8, limit: float = 4.0) -> None:
        self._learning = learning
        self._common = common
        self._limit = limit
        self._speed = 0.0  # logarithms
        self._sizes: dict[int, float] = {}

    def __call__(self, rows: int) -> float:
        """What the table's cost of `rows` rows is to be multiplied with. Sizes not seen yet take
        the factor of the nearest smaller one, else that of the nearest larger one."""
        return exp(self._speed + self._size(rows.bit_length()))

    def _size(self, position: int) -> float:
        sizes = self._sizes
        if not sizes:
            return 0.0
        below = [known for known in sizes if known <= position]
        return sizes[max(below) if below else min(sizes)]

    def record(self, rows: int, ratio: float) -> None:
        """A pass took `ratio` times what the table says."""
        position = rows.bit_length()
        known = self._size(position)
        wanted = log(min(max(ratio, 1 / self._limit), self._limit))
        step = self._learning * (wanted - self._speed - known)
        self._sizes[position] = known + (1 - self._common) * step
        self._speed += self._common * step


def default_table(unit: float = 1.0) -> CostTable:
    """Costs where nothing was measured: each further row a tenth of the first."""
    return CostTable({0: {1: unit, 2: unit * (1 + DEFAULT_ROW_COST)}})


def _along(rows: int, counts: list[int], costs: list[float]) -> float:
    position = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
    low, high = counts[position - 1], counts[position]
    slope = (costs[position] - costs[position - 1]) / (high - low)
    return costs[position - 1] + slope * (rows - low)
