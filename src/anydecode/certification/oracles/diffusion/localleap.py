"""Oracle test of localleap (LocalLeap, arXiv:2510.07081): anchors, their neighbours, and otherwise
the best position."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, UnmaskingRule, dense
from anydecode.certification.oracles.diffusion.scripted_denoising import default_steps, same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("localleap")
def localleap() -> Iterator[Check]:
    """Anchors, their neighbours, and otherwise the best position."""

    def rule_of(threshold: float, relaxed: float, radius: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            anchors = [i for i in state.probabilities if state.max_probability(i) >= threshold]
            near = {i for i in state.probabilities for a in anchors if abs(i - a) <= radius}
            return [
                i
                for i in state.probabilities
                if state.max_probability(i) >= (relaxed if i in near else threshold)
            ] or state.order()[:1]

        return rule

    rule = rule_of(0.8, 0.5, 3)
    decoder = "localleap:threshold=0.8,relaxed=0.5,radius=3,block=12"
    yield same_steps("fills anchors and their neighbours", decoder, rule)
    is_same = same_steps("", "localleap:threshold=0.8,relaxed=0.8,block=12", rule).passed
    yield Check("a rule without neighbours differs", not is_same)
    yield default_steps("localleap", rule_of(0.9, 0.75, 4), script=dense(spread=6.0))


register_losses("localleap", "localleap", accuracy=0.05, passes=0.5)
