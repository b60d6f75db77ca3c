"""Eta sampling: a bound on the probability that follows from the entropy (Hewitt et al.,
"Truncation Sampling as Language Model Desmoothing", arXiv:2210.15191)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.kernels import portable
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import entropy, log_probabilities


@dataclass(frozen=True)
class Eta(LogitsProcessor):
    """Tokens of probability at least min(epsilon, sqrt(epsilon) * exp(-entropy)) (Hewitt et al.,
    2022, arXiv 2210.15191)."""

    epsilon: float

    def apply(self, candidates: Candidates) -> Candidates:
        log_p, p = log_probabilities(candidates.scores)
        typical = float(portable.exp(-entropy(log_p, p)))
        bound = min(self.epsilon, math.sqrt(self.epsilon) * typical)
        return candidates.keep(np.flatnonzero(p >= min(np.float32(bound), p.max())))


@register(
    Card(
        "eta",
        "sampling",
        paper="Truncation Sampling as Language Model Desmoothing (arXiv:2210.15191)",
        exactness="lossy",
        summary="Drops tokens below min(epsilon, sqrt(epsilon) exp(-entropy)).",
        works_with=WORKS_WITH,
        deviations=("the best token is always kept",),
        remote={"epsilon": Range(0, 1)},
    )
)
def eta(epsilon: float = 6e-4) -> SamplerPreset:
    """Eta sampling.

    Args:
        epsilon: A probability; the paper uses 2e-4 to 4e-3.
    """
    return SamplerPreset("eta", {"eta": epsilon})
