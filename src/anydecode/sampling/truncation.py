"""Stateless truncation rules without a key of their own (top-k, top-p, epsilon), and what
truncations share: log-probabilities, entropy, and the best tokens up to a mass.

Every rule keeps some of the candidates, at least one. Ties go to the lower ids: if a rule keeps
"the k best" or "the best up to a mass", tokens of equal score are taken in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.interface import Truncation
from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Candidates, descending, largest
from anydecode.sampling.processor import LogitsProcessor

#: Minimum weight, relative to the best token, of the tokens that top-p considers first.
_NEAR = 1e-3


@dataclass(frozen=True)
class TopK(LogitsProcessor):
    """The `k` most probable tokens (Fan et al., 2018, arXiv 1805.04833)."""

    k: int

    def apply(self, candidates: Candidates) -> Candidates:
        if self.k >= len(candidates):
            return candidates
        return candidates.keep(largest(candidates.scores, self.k))

    def truncated(self, rule: Truncation) -> Truncation | None:
        is_first = not rule.top_k and rule.top_p == 1 and not rule.min_p
        return rule._replace(top_k=self.k) if is_first else None


@dataclass(frozen=True)
class TopP(LogitsProcessor):
    """The most probable tokens whose mass together reaches `p`: nucleus sampling (Holtzman et al.,
    2019, arXiv 1904.09751)."""

    p: float

    def apply(self, candidates: Candidates) -> Candidates:
        weights, total = exponentials(candidates.scores)
        mass = self.p * total
        # Tokens below the second floor weigh less than 1 - p in total, so the others contain the
        # nucleus. Mostly the tokens above the first floor contain it already.
        for floor in (_NEAR, 0.999 * (1 - self.p) * total / len(weights)):
            index = np.flatnonzero(weights >= np.float32(floor))
            if float(weights[index].sum(dtype=np.float64)) > mass * (1 + 1e-6):
                break
        return candidates.keep(heaviest(candidates.scores, weights, index, mass))

    def truncated(self, rule: Truncation) -> Truncation | None:
        return rule._replace(top_p=self.p) if rule.top_p == 1 and not rule.min_p else None


@dataclass(frozen=True)
class Epsilon(LogitsProcessor):
    """Tokens of probability at least `epsilon` (Hewitt et al., 2022, arXiv 2210.15191)."""

    epsilon: float

    def apply(self, candidates: Candidates) -> Candidates:
        weights, total = exponentials(candidates.scores)
        bound = min(self.epsilon * total, 1.0)  # the best token weighs 1
        return candidates.keep(np.flatnonzero(weights >= np.float32(bound)))


def log_probabilities(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ln p and p of softmax(scores), float32."""
    weights, total = exponentials(scores)
    log_p = scores - np.float32(float(scores.max()) + float(portable.log(total)))
    weights *= np.float32(1 / total)
    return log_p, weights


def entropy(log_p: np.ndarray, p: np.ndarray) -> float:
    """-sum(p ln p) in nats."""
    return -float(np.multiply(log_p, p).sum(dtype=np.float64))


#: Keys are sorted only within one bin of this many per unit.
_BINS_PER_UNIT = 32


_NUM_BINS = 1024


def heaviest(keys: np.ndarray, weights: np.ndarray, index: np.ndarray, mass: float) -> np.ndarray:
    """The entries of `index`, ascending, with the largest keys whose weights together reach `mass`.
    Sums the weights by bins of keys, and sorts only the bin in which `mass` is reached."""
    keys, weights = keys[index], weights[index]
    depth = (keys.max() - keys) * np.float32(_BINS_PER_UNIT)
    bins = np.minimum(depth, np.float32(_NUM_BINS - 1)).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights))
    last = int(np.searchsorted(sums, mass))
    if last == len(sums):
        return index
    inside = np.flatnonzero(bins == last)
    inside = inside[descending(keys[inside])]
    before = sums[last - 1] if last else 0.0
    stop = int(np.searchsorted(before + np.cumsum(weights[inside], dtype=np.float64), mass)) + 1
    kept = bins < last
    kept[inside[:stop]] = True
    positions: np.ndarray = index[kept]
    return positions
