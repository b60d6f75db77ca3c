"""XTC (exclude top choices): randomly drops the most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.kernels import portable
from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor


@dataclass(frozen=True)
class ExcludeTopChoices(LogitsProcessor):
    """With probability `probability`, drops all tokens of probability `threshold` or more except
    the least likely of them (XTC; p-e-w, text-generation-webui pull request 6335, 2024).

    The random decision is marginalised: scores become the logarithm of the mixture of both
    outcomes, which is the same distribution, so the rule needs no random numbers and verification
    stays exact. It must be the last truncation, since later ones would be applied to the mixture.
    """

    probability: float
    threshold: float = 0.1

    def apply(self, candidates: Candidates) -> Candidates:
        weights, total = exponentials(candidates.scores)
        top = np.flatnonzero(weights >= np.float32(self.threshold * total))
        if len(top) < 2:
            return candidates
        top_weights = weights[top]
        # Of equally likely tokens the highest id is kept.
        kept = len(top_weights) - 1 - int(top_weights[::-1].argmin())
        dropped = np.delete(top, kept)
        rest = total - float(weights[dropped].sum(dtype=np.float64))
        scores = candidates.writable()
        stay = 1 - self.probability
        raised = np.float32(portable.log(stay + self.probability * total / rest))
        if stay == 0:
            mask = np.ones(len(scores), bool)
            mask[dropped] = False
            return candidates.keep(np.flatnonzero(mask))
        lowered = scores[dropped] + np.float32(portable.log(stay))
        scores += raised
        scores[dropped] = lowered
        return candidates


@register(
    Card(
        "xtc",
        "sampling",
        paper="Exclude Top Choices (p-e-w, text-generation-webui pull request 6335, 2024)",
        bibtex="@misc{xtc2024, title = {Exclude Top Choices (XTC)}, author = {p-e-w},"
        " year = {2024},"
        " howpublished = {oobabooga/text-generation-webui, pull request 6335}}",
        exactness="lossy",
        summary="Randomly drops all likely tokens except the least likely of them.",
        works_with=WORKS_WITH,
        deviations=(
            "the random decision is marginalised: tokens are sampled from the mixture of both"
            " outcomes, which is the same distribution",
            "end-of-text and newline are not exempt, unlike in the first implementation",
        ),
        remote={"probability": Range(0, 1), "threshold": Range(0, 1)},
    )
)
def xtc(probability: float = 0.5, threshold: float = 0.1) -> SamplerPreset:
    """XTC sampling.

    Args:
        probability: Probability of dropping tokens at a position.
        threshold: Of the tokens of this probability or more, only the least likely is kept.
    """
    options = {"xtc_probability": probability, "xtc_threshold": threshold}
    return SamplerPreset("xtc", options)
