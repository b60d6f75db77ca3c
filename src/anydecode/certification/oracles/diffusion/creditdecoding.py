"""Oracle test of creditdecoding (CreditDecoding, arXiv:2510.06133): credits decay, grow by the top
token's probability, and are added to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, steady
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps, threshold_rule
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("creditdecoding")
def creditdecoding() -> Iterator[Check]:
    """Credits decay, grow by the top token's probability, and are added to the logits."""

    def rule(state: StepState) -> Seq[int]:
        credits: dict[int, np.ndarray] = state.memory.setdefault("credits", {})
        if state.block_step == 0:
            credits.clear()
        for i, p in list(state.probabilities.items()):
            credit = credits.setdefault(i, np.zeros(len(p)))
            credit *= 0.8
            credit[p.argmax()] += p.max() ** 0.2
            with np.errstate(divide="ignore"):
                fused = np.log(p) + 3.0 * np.log1p(credit)
            weights = np.exp(fused - fused.max())
            state.probabilities[i] = weights / weights.sum()
        return threshold_rule(0.9)(state)

    decoder = "creditdecoding:weight=3,block=12"
    yield same_steps("credits are combined as published", decoder, rule)
    yield same_steps("credits of earlier passes count", decoder, rule, script=steady())
    plain = same_steps("", "creditdecoding:weight=0,block=12", threshold_rule(0.9)).passed
    yield Check("with weight 0 it is a threshold", plain)
    yield Check(
        "credits change what is filled",
        not same_steps("", decoder, threshold_rule(0.9)).passed,
    )


register_losses("creditdecoding", "creditdecoding", accuracy=0.05, passes=0.5)
