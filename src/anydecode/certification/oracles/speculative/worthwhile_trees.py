"""The part of a tree of rank paths that saves time, for oracle tests: by the costs of passes, and
by the acceptance rate of each rank."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

Ranks = tuple[int, ...]
#: Prior acceptance rates of the ranks, each worth 32 observations.
PRIORS, WEIGHT = (0.336, 0.087, 0.042, 0.027, 0.022, 0.017, 0.015, 0.013), 32
#: Rates and costs are read again after so many tokens.
REFRESH = 64


def seconds(rows: int, context: int) -> float:
    """The cost of a pass in the oracle tests: cheap up to twelve rows."""
    return 1 + 0.02 * rows + 0.2 * max(0, rows - 12) + 0.0001 * rows * context


class WorthwhileRanks:
    """A replay of the choice: `outcomes` are the ranks of the generated tokens so far, 99 for one
    that was no candidate."""

    def __init__(self, paths: Seq[Ranks]) -> None:
        self.paths = paths
        self.outcomes: list[int] = []
        self._chosen: dict[int, list[Ranks]] = {}
        self._num_read = 0

    def saw(self, candidates: Seq[int], token: int) -> None:
        """Notes the rank of a generated token."""
        self.outcomes.append(list(candidates).index(token) if token in candidates else 99)
        if len(self.outcomes) % REFRESH == 0:
            self._chosen = {}

    def choose(self, context: int, cost: Callable[[int, int], float] = seconds) -> list[Ranks]:
        """The rank paths that are drafted after a text of `context` tokens: of all numbers of
        nodes, the one with the most expected tokens per second."""
        part = context // REFRESH
        if part not in self._chosen:
            seen = np.bincount(np.minimum(self.outcomes, 8), minlength=9) if self.outcomes else 0
            counts = np.zeros(9) + seen
            rates = (counts[:8] + WEIGHT * np.array(PRIORS)) / (len(self.outcomes) + WEIGHT)
            values = {path: float(np.prod(rates[list(path)])) for path in self.paths}
            best = sorted(self.paths, key=lambda path: (-values[path], len(path), path))
            gains = [
                (1 + sum(values[path] for path in best[:count])) / cost(1 + count, context)
                for count in range(len(best) + 1)
            ]
            self._chosen[part] = best[: gains.index(max(gains))]
        return self._chosen[part]
