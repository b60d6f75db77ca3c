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

    def note(self, rows: int, context: int, seconds: float) -> None:
        """A pass of the sequence alone took this long."""
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
        low, counts, costs = lines[place - 1]
        high, more_counts, more_costs = lines[place]
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


class Correction:
    """Factors that bring a table closer to the passes really seen, by the number of rows' order of
    magnitude. A table measured while the machine was busy mends itself this way."""

    def __init__(self, learning: float = 0.05, most: float = 4.0) -> None:
        self._learning = learning
        self._most = most
        self._factors: dict[int, float] = {}

    def __call__(self, rows: int) -> float:
        """What the table's cost of `rows` rows is to be multiplied with. Sizes not seen yet take
        the factor of the nearest smaller one, else that of the nearest larger one."""
        factors = self._factors
        if not factors:
            return 1.0
        place = rows.bit_length()
        below = [known for known in factors if known <= place]
        return factors[max(below)] if below else factors[min(factors)]

    def note(self, rows: int, ratio: float) -> None:
        """A pass took `ratio` times what the table says."""
        place = rows.bit_length()
        known = self(rows)
        ratio = min(max(ratio, 1 / self._most), self._most)
        self._factors[place] = known + self._learning * (ratio - known)


def guessed(unit: float = 1.0) -> CostTable:
    """Costs where nothing was measured: each further row a tenth of the first."""
    return CostTable({0: {1: unit, 2: unit * (1 + GUESSED_ROW)}})


def _along(rows: int, counts: list[int], costs: list[float]) -> float:
    place = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
    low, high = counts[place - 1], counts[place]
    slope = (costs[place] - costs[place - 1]) / (high - low)
    return costs[place - 1] + slope * (rows - low)
