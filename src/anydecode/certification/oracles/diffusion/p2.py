"""Oracle test of p2 (Path Planning, arXiv:2502.03540): which positions every step masks; and passes
on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Revision,
    Rule,
    returns,
    revised,
    traced,
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
    num_returns = 0
    for name, script in (("drifting", drifting(4.0)), ("confident", CONFIDENT)):
        for decoder, steps, block, length in (
            ("p2:steps=6", 6, 20, 20),
            ("p2:block=8,steps=3", 3, 8, 20),
            ("p2", 14, 14, 14),
        ):
            for temperature in (0.0, 0.8):
                options: dict[str, Any] = {"temperature": temperature, "seed": 3}
                expected = revised(script, length, block, path_planning(steps), **options)
                actual = traced(decoder, script, length, **options)
                name_of = f"{decoder} equals the oracle, {name}, T={temperature}"
                yield Check(name_of, actual == expected)
                num_returns += returns(actual)
    yield Check("tokens are masked again", num_returns > 10, f"{num_returns} returns")


register_losses("p2", "p2:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
