"""Locally typical sampling: tokens whose surprise is closest to the entropy (Meister et al.,
"Locally Typical Sampling", arXiv:2202.00666)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import entropy, heaviest, log_probabilities

#: Maximum distance from the entropy, in nats, of the tokens that typical sampling considers first.
_CLOSE = 4.0


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
        return candidates.keep(heaviest(closeness, p, index, self.p))


@register(
    Card(
        "typical",
        "sampling",
        paper="Locally Typical Sampling (arXiv:2202.00666)",
        exactness="lossy",
        summary="Keeps tokens whose surprise is closest to the entropy, up to a mass of `p`.",
        works_with=WORKS_WITH,
        deviations=("tokens equally far from the entropy are taken in ascending order of id",),
        remote={"p": Range(0, 1)},
    )
)
def typical(p: float = 0.95) -> SamplerPreset:
    """Locally typical sampling.

    Args:
        p: Probability mass to keep.
    """
    return SamplerPreset("typical", {"typical_p": p})
