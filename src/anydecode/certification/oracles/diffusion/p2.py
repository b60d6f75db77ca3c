"""Oracle test of p2 (Path Planning, arXiv:2502.03540): which positions every step masks; and passes
on tasks."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK


def path_planning(steps: int) -> Rule:
    """Step k of S leaves floor(n (1 - (k + 1) / S)) masks: those of the least sure samples."""

    def rule(state: Revision) -> bool:
        fresh = {i: state.token(i) for i in state.cells}
        sure = {i: state.probability(i, fresh[i]) for i in state.cells}
        kappa_left = steps - state.block_step - 1
        worst = sorted(state.cells, key=lambda i: (sure[i], -i))
        masked = set(worst[: len(state.cells) * kappa_left // steps])
        state.canvas[:] = [
            MASK if i in masked else fresh[i] if i in fresh and token == MASK else token
            for i, token in enumerate(state.canvas)
        ]
        return not kappa_left

    return rule


@oracle_test("p2")
def p2() -> Iterator[Check]:
    """Every canvas equals the oracle's; a token may return to a mask."""
    scripts = {"drifting": drifting(4.0), "confident": CONFIDENT}
    cases = [
        Case("p2:steps=6", path_planning(6), 20, 20),
        Case("p2:block=8,steps=3", path_planning(3), 8, 20),
        Case("p2", path_planning(14), 14, 14),
    ]
    num_returns = yield from equal_canvases(scripts, cases)
    yield Check("tokens are masked again", num_returns > 10, f"{num_returns} returns")


register_losses("p2", "p2:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
