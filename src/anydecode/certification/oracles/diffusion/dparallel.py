"""Oracle test of dparallel (dParallel, arXiv:2509.26488): every position of low entropy."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, UnmaskingRule, entropy_nats
from anydecode.certification.oracles.diffusion.scripted_denoising import default_steps, same_steps
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses


@oracle_test("dparallel")
def dparallel() -> Iterator[Check]:
    """Every position of low entropy."""

    def rule(entropy: float) -> UnmaskingRule:
        def select(state: StepState) -> list[int]:
            low = [i for i, p in state.probabilities.items() if entropy_nats(p) <= entropy]
            return low or state.order(lambda p: -entropy_nats(p))[:1]

        return select

    yield same_steps("fills positions of low entropy", "dparallel:entropy=0.9,block=12", rule(0.9))
    yield default_steps("dparallel", rule(0.5))


register_losses("dparallel", "dparallel", accuracy=0.08, passes=0.5, tasks=DETERMINED)
