"""Stateless truncation rules: each keeps some of the candidates, at least one.

Ties go to the lower ids: if a rule keeps "the k best" or "the best up to a mass", tokens of equal
score are taken in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.sampling.candidates import Candidates, descending, exponentials, largest
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor

#: Minimum weight, relative to the best token, of the tokens that top-p considers first.
_NEAR = 1e-3

#: Maximum distance from the entropy, in nats, of the tokens that typical sampling considers first.
_CLOSE = 4.0


@dataclass(frozen=True)
class TopK(LogitsProcessor):
    """The `k` most probable tokens (Fan et al., 2018, arXiv 1805.04833)."""

    k: int

    def apply(self, candidates: Candidates) -> Candidates:
        if self.k >= len(candidates):
            return candidates
        return candidates.keep(largest(candidates.scores, self.k))


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
        return candidates.keep(_heaviest(candidates.scores, weights, index, mass))


@dataclass(frozen=True)
class MinP(LogitsProcessor):
    """Tokens at least `p` times as probable as the best one (Nguyen et al., 2024, arXiv
    2407.01082)."""

    p: float

    def apply(self, candidates: Candidates) -> Candidates:
        scores = candidates.scores
        bound = scores.max() + np.float32(np.log(self.p))
        return candidates.keep(np.flatnonzero(scores >= bound))


@dataclass(frozen=True)
class Typical(LogitsProcessor):
    """Tokens whose surprise is closest to the entropy, up to a mass of `p` (Meister et al., 2022,
    arXiv 2202.00666)."""

    p: float

    def apply(self, candidates: Candidates) -> Candidates:
        log_p, p = log_probabilities(candidates.scores)
        closeness = -np.abs(log_p + entropy(log_p, p))
        for max_distance in (_CLOSE, np.inf):
            index = np.flatnonzero(closeness >= -np.float32(max_distance))
            if float(p[index].sum(dtype=np.float64)) > self.p * (1 + 1e-6):
                break
        return candidates.keep(_heaviest(closeness, p, index, self.p))


@dataclass(frozen=True)
class Epsilon(LogitsProcessor):
    """Tokens of probability at least `epsilon` (Hewitt et al., 2022, arXiv 2210.15191)."""

    epsilon: float

    def apply(self, candidates: Candidates) -> Candidates:
        weights, total = exponentials(candidates.scores)
        bound = min(self.epsilon * total, 1.0)  # the best token weighs 1
        return candidates.keep(np.flatnonzero(weights >= np.float32(bound)))


@dataclass(frozen=True)
class Eta(LogitsProcessor):
    """Tokens of probability at least min(epsilon, sqrt(epsilon) * exp(-entropy)) (Hewitt et al.,
    2022, arXiv 2210.15191)."""

    epsilon: float

    def apply(self, candidates: Candidates) -> Candidates:
        log_p, p = log_probabilities(candidates.scores)
        bound = min(self.epsilon, float(np.sqrt(self.epsilon) * np.exp(-entropy(log_p, p))))
        return candidates.keep(np.flatnonzero(p >= min(np.float32(bound), p.max())))


@dataclass(frozen=True)
class TopNSigma(LogitsProcessor):
    """Tokens within `n` standard deviations of the best score; the deviation is that of the
    remaining candidates (Tang et al., 2024, arXiv 2411.07641)."""

    n: float

    def apply(self, candidates: Candidates) -> Candidates:
        scores = candidates.scores
        deviation = float(scores.astype(np.float64).std())
        bound = float(scores.max()) - self.n * deviation
        return candidates.keep(np.flatnonzero(scores >= np.float32(bound)))


def log_probabilities(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ln p and p of softmax(scores), float32."""
    weights, total = exponentials(scores)
    log_p = scores - np.float32(float(scores.max()) + np.log(total))
    weights *= np.float32(1 / total)
    return log_p, weights


def entropy(log_p: np.ndarray, p: np.ndarray) -> float:
    """-sum(p ln p) in nats."""
    return -float(np.multiply(log_p, p).sum(dtype=np.float64))


#: Keys are sorted only within one bin of this many per unit.
_BINS_PER_UNIT = 32
_NUM_BINS = 1024


def _heaviest(keys: np.ndarray, weights: np.ndarray, index: np.ndarray, mass: float) -> np.ndarray:
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


@register(
    Card(
        "min-p",
        "sampling",
        paper="Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs"
        " (arXiv:2407.01082)",
        exactness="lossy",
        summary="Keeps tokens at least `p` times as probable as the best one.",
        works_with=WORKS_WITH,
        deviations=("the bound is applied after the temperature, as in transformers",),
    )
)
def min_p(p: float = 0.05) -> SamplerPreset:
    """Min-p sampling.

    Args:
        p: Minimum probability relative to the best token.
    """
    return SamplerPreset("min-p", {"min_p": p})


@register(
    Card(
        "typical",
        "sampling",
        paper="Locally Typical Sampling (arXiv:2202.00666)",
        exactness="lossy",
        summary="Keeps tokens whose surprise is closest to the entropy, up to a mass of `p`.",
        works_with=WORKS_WITH,
        deviations=("tokens equally far from the entropy are taken in ascending order of id",),
    )
)
def typical(p: float = 0.95) -> SamplerPreset:
    """Locally typical sampling.

    Args:
        p: Probability mass to keep.
    """
    return SamplerPreset("typical", {"typical_p": p})


@register(
    Card(
        "eta",
        "sampling",
        paper="Truncation Sampling as Language Model Desmoothing (arXiv:2210.15191)",
        exactness="lossy",
        summary="Drops tokens below min(epsilon, sqrt(epsilon) exp(-entropy)).",
        works_with=WORKS_WITH,
        deviations=("the best token is always kept",),
    )
)
def eta(epsilon: float = 6e-4) -> SamplerPreset:
    """Eta sampling.

    Args:
        epsilon: A probability; the paper uses 2e-4 to 4e-3.
    """
    return SamplerPreset("eta", {"eta": epsilon})


@register(
    Card(
        "top-n-sigma",
        "sampling",
        paper="Top-nsigma: Not All Logits Are You Need (arXiv:2411.07641)",
        exactness="lossy",
        summary="Keeps tokens within `n` standard deviations of the best logit.",
        works_with=WORKS_WITH,
        deviations=(
            "the deviation is that of the tokens that penalties and constraint allow, since a"
            " forbidden token has no logit",
        ),
    )
)
def top_n_sigma(n: float = 1.0) -> SamplerPreset:
    """Top-n-sigma sampling.

    Args:
        n: Maximum distance from the best logit, in standard deviations.
    """
    return SamplerPreset("top-n-sigma", {"top_n_sigma": n})
