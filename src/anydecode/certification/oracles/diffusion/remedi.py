"""Oracle test of remedi (arXiv:2509.23653): which tokens every step keeps; and passes on tasks."""

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
    scripts = {"drifting": drifting(4.0), "confident": CONFIDENT}
    cases = [
        Case("remedi:steps=3,block=8", reflection(3), 8, 20),
        Case("remedi:steps=6", reflection(6), 32, 40),
        Case("remedi:block=10", reflection(None), 10, 10),
    ]
    num_returns = yield from equal_canvases(scripts, cases)
    yield Check("tokens are masked again", num_returns > 10, f"{num_returns} returns")


register_losses("remedi", "remedi:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
