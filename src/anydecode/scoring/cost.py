"""The cost of a forward pass in seconds, by number of rows and context length, with a default for
models that were not measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from math import exp, log, log2
from typing import Any

#: Default cost of one more row, as a fraction of a pass over one row.
DEFAULT_ROW_COST = 0.1
#: The positions for which the costs of several passes are computed together, and the number of such
#: costs that are kept.
COST_CONTEXT, MAX_COSTS = 128, 256


class CostModel(ABC):
    """The cost of a forward pass and the current load of the engine, as decoders see them."""

    @abstractmethod
    def seconds(self, rows: int, context: int) -> float:
        """Returns the duration of one pass in seconds.

        Args:
            rows: Number of rows (tokens) in the pass.
            context: Number of cached positions that each row attends to.
        """

    @abstractmethod
    def num_others(self) -> int:
        """Returns the number of other running sequences. Each adds about one row to every pass."""

    @abstractmethod
    def host_seconds(self, num_sequences: int) -> float:
        """Returns what `seconds` counts beside the pass itself: the work of the engine before and
        after it, which passes of one multi-step call share."""

    def num_waiting(self) -> int:
        """Returns the number of sequences that wait until one of the running ones ends."""
        return 0

    def end_rate(self) -> float:
        """Returns the rate at which texts end before their limits, per generated token; 0 before
        one has ended."""
        return 0.0

    def version(self) -> int:
        """Returns a number, 0 or more, that changes after costs have changed."""
        return 0

    def pass_seconds(
        self, rows: int, num_drafts: int, context: int, width: int = 1
    ) -> tuple[float, ...]:
        """Returns the durations of passes with 0 to `num_drafts` drafts, in seconds. They never
        fall. All callers share what was computed for about as many positions, until costs change
        (`version`).

        Args:
            rows: Number of rows without drafts.
            num_drafts: Maximum number of drafts.
            context: Number of cached positions that each row attends to.
            width: Number of rows of each draft.
        """
        key = rows, num_drafts, context // COST_CONTEXT, width
        version = self.version()
        known, costs = self._pass_seconds.get(key, (-1, ()))
        if known != version:
            positions = key[2] * COST_CONTEXT + COST_CONTEXT // 2
            counts = range(rows, rows + width * num_drafts + 1, width)
            # Corrections of two sizes may make more rows look cheaper, which they never are.
            costs = tuple(accumulate((self.seconds(n, positions) for n in counts), max))
            if len(self._pass_seconds) > MAX_COSTS:
                self._pass_seconds.clear()
            self._pass_seconds[key] = version, costs
        return costs

    @cached_property
    def _pass_seconds(self) -> dict[tuple[int, int, int, int], tuple[int, tuple[float, ...]]]:
        """The durations by the arguments of `pass_seconds`, with the version of the costs."""
        return {}


#: The smallest duration of a pass, in seconds.
MIN_SECONDS = 1e-6


@dataclass(frozen=True)
class CostTable:
    """Measured pass durations: `seconds_by[context][n]` is the duration of a pass of n rows.

    Costs are interpolated between measured points and extrapolated with the last slope beyond
    them. They never decrease with n, and are never less than `MIN_SECONDS`: the system's clock of
    processor time may advance so rarely that a pass seems to take none.
    """

    seconds_by: Mapping[int, Mapping[int, float]]
    _curves: list[tuple[list[int], list[float]]] = field(init=False, repr=False, compare=False)
    _contexts: list[int] = field(init=False, repr=False, compare=False)
    # By number of rows, what was interpolated for each context.
    _seconds: dict[int, list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.seconds_by or any(len(line) < 2 for line in self.seconds_by.values()):
            raise ValueError("a cost table needs at least two numbers of rows per context")
        curves = []
        for context in sorted(self.seconds_by):
            counts = sorted(self.seconds_by[context])
            costs, max_cost = [], 0.0
            for count in counts:
                max_cost = max(max_cost, self.seconds_by[context][count])
                costs.append(max_cost)
            curves.append((counts, costs))
        object.__setattr__(self, "_curves", curves)
        object.__setattr__(self, "_contexts", sorted(self.seconds_by))
        object.__setattr__(self, "_seconds", {})

    def seconds(self, rows: int, context: int) -> float:
        """The duration of a pass over `rows` rows that each attend to about `context` positions."""
        seconds, contexts = self._seconds.get(rows), self._contexts
        if seconds is None:
            seconds = [_interpolate(rows, *curve) for curve in self._curves]
            self._seconds[rows] = seconds
        if len(contexts) == 1:
            return max(seconds[0], MIN_SECONDS)
        index = min(max(bisect_right(contexts, context), 1), len(contexts) - 1)
        low, high = contexts[index - 1], contexts[index]
        shorter, longer = seconds[index - 1], seconds[index]
        return max(
            shorter + (longer - shorter) * (max(context, low) - low) / (high - low), MIN_SECONDS
        )

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
        """The table that `to_dict` wrote. Raises KeyError, TypeError or ValueError for other
        data."""
        seconds_by: dict[int, dict[int, float]] = {}
        for row in data["rows"]:
            seconds_by.setdefault(int(row["context"]), {})[int(row["n"])] = float(row["seconds"])
        return CostTable(seconds_by)


@dataclass(frozen=True)
class ThreadCosts:
    """Measured pass durations by number of threads: `tables[k]` is the cost table of k threads.
    Between measured numbers of threads, the speed (passes per second) is interpolated.

    `beside` has the durations with half of the threads while the other half computes a pass of the
    other kind (of answers beside a prompt, of a prompt beside answers); None: not measured.
    """

    tables: Mapping[int, CostTable]
    beside: CostTable | None = None

    def seconds(self, rows: int, context: int, threads: int) -> float:
        """The duration of a pass over `rows` rows that each attend to about `context` positions,
        with `threads` threads, between the smallest and the largest measured number."""
        low = max(count for count in self.tables if count <= threads)
        high = min(count for count in self.tables if count >= threads)
        slower, faster = (self.tables[one].seconds(rows, context) for one in (low, high))
        share = (threads - low) / (high - low) if high > low else 0.0
        return 1 / ((1 - share) / slower + share / faster)

    def contention(self, rows: int, context: int) -> float:
        """The factor by which a pass takes longer beside one of the other kind than alone with the
        same threads, since both use the same memory; 1 if it was not measured."""
        if self.beside is None:
            return 1.0
        alone = self.seconds(rows, context, max(self.tables) // 2)
        return max(1.0, self.beside.seconds(rows, context) / alone)


class CostCorrection:
    """Online correction of a cost table from observed passes.

    The correction is the product of two factors: one for the current speed of the machine, and one
    for the number of rows, which is interpolated between those of 1, 2, 4, 8, ... rows. So a pass
    of one more row is never expensive or cheap only because its rows are counted with others. The
    speed factor takes the share `shared` of every update, so that rarely run sizes follow the
    others. A table that was measured on a busy machine is corrected this way.

    Args:
        rate: Learning rate, between 0 and 1, of the logarithms of the factors.
        shared: Share of each update that goes to the speed factor.
        limit: Observed ratios are clipped to between 1 / `limit` and `limit`.
    """

    def __init__(self, rate: float = 0.05, shared: float = 0.8, limit: float = 4.0) -> None:
        self._rate = rate
        self._shared = shared
        self._limit = limit
        self._speed = 0.0  # logarithms
        self._sizes: dict[int, float] = {}
        self._nearest: dict[int, int] = {}  # the size that a size takes the factor of

    def __call__(self, rows: int) -> float:
        """The factor to multiply the table's cost of `rows` rows with. Sizes without observations
        take the factor of the nearest smaller size, else of the nearest larger size."""
        return exp(self._speed + self._interpolated(*_between(rows)))

    def _interpolated(self, size: int, share: float) -> float:
        """The logarithm of the factor at `share` of the way from 2^size rows to twice as many."""
        smaller = self._size_factor(size)
        if not share:
            return smaller
        return smaller + share * (self._size_factor(size + 1) - smaller)

    def _size_factor(self, size: int) -> float:
        sizes = self._sizes
        if not sizes:
            return 0.0
        nearest = self._nearest.get(size)
        if nearest is None:
            smaller = [other for other in sizes if other <= size]
            nearest = self._nearest[size] = max(smaller) if smaller else min(sizes)
        return sizes[nearest]

    def record(self, rows: int, ratio: float) -> None:
        """Record a pass that took `ratio` times the cost in the table."""
        size, share = _between(rows)
        target = log(min(max(ratio, 1 / self._limit), self._limit))
        step = self._rate * (target - self._speed - self._interpolated(size, share))
        # Both sizes move as far as brings the factor between them by its part of the step.
        own = (1 - self._shared) * step / ((1 - share) ** 2 + share**2)
        changed = {size: self._size_factor(size) + (1 - share) * own}
        if share:
            changed[size + 1] = self._size_factor(size + 1) + share * own
        if not changed.keys() <= self._sizes.keys():
            self._nearest.clear()
        self._sizes |= changed
        self._speed += self._shared * step


@lru_cache(maxsize=1024)
def _between(rows: int) -> tuple[int, float]:
    """The size below a number of rows, as its binary logarithm, and the share of the way from it to
    the next one, by logarithms."""
    size = rows.bit_length() - 1
    return size, log2(rows) - size


def default_table(unit: float = 1.0) -> CostTable:
    """The table for models that were not measured: each further row costs a tenth of the first."""
    return CostTable({0: {1: unit, 2: unit * (1 + DEFAULT_ROW_COST)}})


class DefaultCosts(CostModel):
    """The cost model of sequences outside an engine: the default table, and no other sequences."""

    def __init__(self) -> None:
        self._table = default_table()

    def seconds(self, rows: int, context: int) -> float:
        return self._table.seconds(rows, context)

    def num_others(self) -> int:
        return 0

    def host_seconds(self, num_sequences: int) -> float:
        return 0.0


DEFAULT_COSTS = DefaultCosts()


def _interpolate(rows: int, counts: list[int], costs: list[float]) -> float:
    index = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
    low, high = counts[index - 1], counts[index]
    slope = (costs[index] - costs[index - 1]) / (high - low)
    return costs[index - 1] + slope * (rows - low)
