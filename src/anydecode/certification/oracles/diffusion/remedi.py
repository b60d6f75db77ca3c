"""Oracle test of remedi (arXiv:2509.23653): which tokens every step keeps; and passes on tasks."""

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


def reflection(steps: int | None) -> Rule:
    """Fill everything, keep the tokens of the largest logits: as many as a schedule has filled."""

    def rule(state: Revision) -> bool:
        cells, count = state.cells, min(steps or len(state.cells), len(state.cells))
        quotas = [len(cells) // count + (k < len(cells) % count) for k in range(count)]
        tokens = {i: state.token(i) if i in state.masks else state.canvas[i] for i in cells}
        logits = {i: float(state.row(i)[tokens[i]]) for i in cells}
        num_kept = sum(quotas[: state.block_step + 1])
        kept = sorted(cells, key=lambda i: (-logits[i], i))[:num_kept]
        for i in cells:
            tokens[i] = tokens[i] if i in kept else MASK
        for i in cells:
            state.canvas[i] = tokens[i]
        return num_kept == len(cells)

    return rule


@oracle_test("remedi")
def remedi() -> Iterator[Check]:
    """Every canvas equals the oracle's; a token may return to a mask."""
    num_returns = 0
    for name, script in (("drifting", drifting(4.0)), ("confident", CONFIDENT)):
        for decoder, steps, block, length in (
            ("remedi:steps=3,block=8", 3, 8, 20),
            ("remedi:steps=6", 6, 32, 40),
            ("remedi:block=10", None, 10, 10),
        ):
            for temperature in (0.0, 0.8):
                options: dict[str, Any] = {"temperature": temperature, "seed": 3}
                expected = revised(script, length, block, reflection(steps), **options)
                actual = traced(decoder, script, length, **options)
                name_of = f"{decoder} equals the oracle, {name}, T={temperature}"
                yield Check(name_of, actual == expected)
                num_returns += returns(actual)
    yield Check("tokens are masked again", num_returns > 10, f"{num_returns} returns")


register_losses("remedi", "remedi:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
