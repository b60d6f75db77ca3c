"""Oracle test of creditdecoding (CreditDecoding, arXiv:2510.06133): credits decay, grow by the top
token's probability, and are added to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, UnmaskingRule, steady
from anydecode.certification.oracles.diffusion.scripted_denoising import (
    default_steps,
    same_steps,
    threshold_rule,
)
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("creditdecoding")
def creditdecoding() -> Iterator[Check]:
    """Credits decay, grow by the top token's probability, and are added to the logits."""

    def rule_of(weight: float) -> UnmaskingRule:
        def rule(state: StepState) -> Seq[int]:
            credits: dict[int, np.ndarray] = state.memory.setdefault("credits", {})
            if state.block_step == 0:
                credits.clear()
            for i, p in list(state.probabilities.items()):
                credit = credits.setdefault(i, np.zeros(len(p)))
                credit *= 0.8
                credit[p.argmax()] += p.max() ** 0.2
                with np.errstate(divide="ignore"):
                    fused = np.log(p) + weight * np.log1p(credit)
                weights = np.exp(fused - fused.max())
                state.probabilities[i] = weights / weights.sum()
                state.tokens[i] = int(fused.argmax())
            return threshold_rule(0.9)(state)

        return rule

    rule = rule_of(3.0)
    decoder = "creditdecoding:weight=3,block=12"
    yield same_steps("credits are combined as published", decoder, rule)
    yield same_steps("credits of earlier passes count", decoder, rule, script=steady())
    default = rule_of(0.7)
    yield default_steps("creditdecoding", default, script=steady())
    yield same_steps(
        "the same where the model is more confident",
        "creditdecoding",
        default,
        block=32,
        script=steady(spread=4.0),
        length=40,
    )
    plain = same_steps("", "creditdecoding:weight=0,block=12", threshold_rule(0.9)).passed
    yield Check("with weight 0 it is a threshold", plain)
    yield Check(
        "credits change what is filled",
        not same_steps("", decoder, threshold_rule(0.9)).passed,
    )


register_losses("creditdecoding", "creditdecoding", accuracy=0.05, passes=0.5)
