"""Min-p sampling: tokens at least `p` times as probable as the best one (Nguyen et al., "Turning Up
the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", arXiv:2407.01082)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.kernels import portable
from anydecode.kernels.interface import Truncation
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor


@dataclass(frozen=True)
class MinP(LogitsProcessor):
    """Tokens at least `p` times as probable as the best one (Nguyen et al., 2024, arXiv
    2407.01082)."""

    p: float

    def apply(self, candidates: Candidates) -> Candidates:
        scores = candidates.scores
        bound = scores.max() + np.float32(portable.log(self.p))
        return candidates.keep(np.flatnonzero(scores >= bound))

    def truncated(self, rule: Truncation) -> Truncation | None:
        return None if rule.min_p else rule._replace(min_p=self.p)


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
        remote={"p": Range(0, 1)},
    )
)
def min_p(p: float = 0.05) -> SamplerPreset:
    """Min-p sampling.

    Args:
        p: Minimum probability relative to the best token.
    """
    return SamplerPreset("min-p", {"min_p": p})
