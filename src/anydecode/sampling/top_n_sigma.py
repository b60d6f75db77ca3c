"""Top-n-sigma sampling: tokens within `n` standard deviations of the best logit (Tang et al.,
"Top-nsigma: Not All Logits Are You Need", arXiv:2411.07641)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor


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
        remote={"n": Range(0, 100)},
    )
)
def top_n_sigma(n: float = 1.0) -> SamplerPreset:
    """Top-n-sigma sampling.

    Args:
        n: Maximum distance from the best logit, in standard deviations.
    """
    return SamplerPreset("top-n-sigma", {"top_n_sigma": n})
