"""Exclude top choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.sampling.candidates import Candidates, exponentials
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor


@dataclass(frozen=True)
class ExcludeTopChoices(LogitsProcessor):
    """With `probability`, all tokens of probability `threshold` or more are dropped but the least
    likely of them (XTC; p-e-w, text-generation-webui pull request 6335, 2024).

    The coin is summed out: scores become the logarithm of the mixture of both outcomes, which is
    the same distribution, so the rule needs no noise of its own and verification stays exact. It
    has to come last, since later truncations would see the mixture.
    """

    probability: float
    threshold: float = 0.1

    def apply(self, candidates: Candidates) -> Candidates:
        weights, total = exponentials(candidates.scores)
        top = np.flatnonzero(weights >= np.float32(self.threshold * total))
        if len(top) < 2:
            return candidates
        held = weights[top]
        spared = len(held) - 1 - int(held[::-1].argmin())  # among equals the highest id stays
        dropped = np.delete(top, spared)
        rest = total - float(weights[dropped].sum(dtype=np.float64))
        scores = candidates.writable()
        stay = 1 - self.probability
        raised = np.float32(np.log(stay + self.probability * total / rest))
        if stay == 0:
            mask = np.ones(len(scores), bool)
            mask[dropped] = False
            return candidates.keep(np.flatnonzero(mask))
        lowered = scores[dropped] + np.float32(np.log(stay))
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
        summary="Now and then all likely tokens but the least likely of them are dropped.",
        works_with=WORKS_WITH,
        deviations=(
            "the coin is summed out: tokens are drawn from the mixture of both outcomes, which is"
            " the same distribution",
            "end-of-text and newline are not spared, as the first implementation did",
        ),
    )
)
def xtc(probability: float = 0.5, threshold: float = 0.1) -> SamplerPreset:
    """With `probability`, only the least likely of the tokens above `threshold` stays of them."""
    options = {"xtc_probability": probability, "xtc_threshold": threshold}
    return SamplerPreset("xtc", options)
