"""The search of SWIFT for the sublayers that a draft leaves out: random sets, and every so often
the set that a Gaussian process expects most of."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from math import comb
from random import Random

import numpy as np

from anydecode.kernels.interface import SkippedParts

#: Numbers of sublayers: the attention of the inner layers first, then their MLPs.
SkippedSet = frozenset[int]

#: One proposal of this many is that of the Gaussian process.
MODEL_INTERVAL = 25
#: The search ends above this score, or after this many proposals in all, or without a gain.
MAX_SCORE, MAX_PROPOSALS, MAX_WITHOUT_GAIN = 0.95, 1000, 300
#: The most sets among which the Gaussian process chooses.
MAX_CANDIDATES = 1024
#: Variance of the noise of scores, and weight of the deviation in the upper confidence bound.
NOISE, KAPPA = 1e-2, 2.5
#: Length scales of the kernel that are tried.
LENGTHS = tuple(2.0**power for power in range(-2, 5))


class LayerSearch:
    """What is known of the sets of sublayers of one model, over all texts.

    Args:
        num_layers: Layers of the model, of which the first and the last are always kept.
        ratio: The share of the other layers' sublayers that a set leaves out.

    Attributes:
        size: The number of sublayers that may be left out.
        budget: How many of them a set leaves out.
        best: The set to draft with; every other inner layer before the search.
        is_searched: Whether `best` was found.
        is_over: Whether no more sets are proposed.
    """

    def __init__(self, num_layers: int, ratio: float) -> None:
        self.num_layers = num_layers
        self.size = 2 * (num_layers - 2)
        self.budget = int(self.size * ratio)
        inner = range(0, num_layers - 2, 2)
        self.best: SkippedSet = frozenset([*inner, *(num_layers - 2 + one for one in inner)])
        self.is_searched = self.is_over = False
        self._random, self._num_proposals, self._num_without_gain = Random(0), 0, 0
        self._sets: list[SkippedSet] = []
        self._scores: list[float] = []

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the scores, in bytes."""
        return 64 * (self.budget + 4) * len(self._sets)

    def parts(self, skipped: SkippedSet) -> SkippedParts:
        """The set as a variant of the layers."""
        inner = self.num_layers - 2
        mixers = frozenset(one + 1 for one in skipped if one < inner)
        return SkippedParts(mixers, frozenset(one - inner + 1 for one in skipped if one >= inner))

    def propose(self, tried: Collection[SkippedSet]) -> SkippedSet | None:
        """A set that is not in `tried`, or None if there is no other."""
        num_sets = comb(self.size, self.budget)
        if sum(len(one) == self.budget for one in tried) >= num_sets:
            return None
        if (self._num_proposals + 1) % MODEL_INTERVAL:
            return self._random_set(tried)
        if num_sets <= MAX_CANDIDATES:
            every = map(frozenset, combinations(range(self.size), self.budget))
            candidates = [one for one in every if one not in tried]
        else:
            candidates = [self._random_set(tried) for _ in range(MAX_CANDIDATES)]
        bounds = upper_bounds(
            self._points(self._sets), np.array(self._scores), self._points(candidates)
        )
        return candidates[int(bounds.argmax())]

    def record(self, skipped: SkippedSet, score: float, best_score: float) -> None:
        """Add the score of a proposal on a text on which `best` has `best_score`, or 0 before the
        search has found one."""
        self._sets.append(skipped)
        self._scores.append(score)
        self._num_proposals += 1
        self._num_without_gain += 1
        if score > best_score:
            self.best, self.is_searched, self._num_without_gain = skipped, True, 0
        self.is_over = (
            self._num_without_gain > MAX_WITHOUT_GAIN
            or self._num_proposals > MAX_PROPOSALS
            or score > max(best_score, MAX_SCORE)
        )

    def _random_set(self, tried: Collection[SkippedSet]) -> SkippedSet:
        while True:
            found = frozenset(self._random.sample(range(self.size), self.budget))
            if found not in tried:
                return found

    def _points(self, sets: list[SkippedSet]) -> np.ndarray:
        points = np.zeros((len(sets), self.size))
        for point, one in zip(points, sets, strict=True):
            point[list(one)] = 1
        return points


def upper_bounds(points: np.ndarray, scores: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Mean plus `KAPPA` deviations of a Gaussian process with the Matern kernel (nu = 5/2) at
    `candidates`, float64 `[c, d]`, after `scores` `[n]` at `points` `[n, d]`. Its length scale is
    the one of `LENGTHS` with the largest likelihood."""
    mean, spread = scores.mean(), scores.std() or 1.0
    targets, best = (scores - mean) / spread, (-np.inf, np.empty(0))
    distances, across = _distances(points, points), _distances(candidates, points)
    for length in LENGTHS:
        factor = np.linalg.cholesky(_matern(distances / length) + NOISE * np.eye(len(points)))
        whitened = np.linalg.solve(factor, targets)
        likelihood = -0.5 * whitened @ whitened - np.log(np.diag(factor)).sum()
        if likelihood > best[0]:
            seen = np.linalg.solve(factor, _matern(across / length).T)
            deviation = np.sqrt(np.maximum(1 - (seen * seen).sum(0), 0))
            best = (likelihood, mean + spread * (whitened @ seen + KAPPA * deviation))
    return best[1]


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
    distances: np.ndarray = np.sqrt(np.maximum(squares, 0))
    return distances


def _matern(distance: np.ndarray) -> np.ndarray:
    scaled = np.sqrt(5) * distance
    kernel: np.ndarray = (1 + scaled + scaled * scaled / 3) * np.exp(-scaled)
    return kernel
