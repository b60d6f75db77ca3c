"""Oracle test of wino (arXiv:2507.18578): which masks every step fills and which tokens it masks
again, given rows that do not see their own position; and accuracy and passes on tasks."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, dense, softmax, steady
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
    returns,
    traced,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK


def revoking(threshold: float, keep: float) -> Rule:
    """Draft above the threshold, within the limits; mask tokens below `keep` again."""

    def rule(state: Revision) -> bool:
        masks, last = state.masks, state.memory.get("last", 30)
        tokens = {i: state.token(i) for i in masks}
        sure = {i: state.probability(i, tokens[i]) for i in masks}
        order = sorted(masks, key=lambda i: (-sure[i], i))
        limit = min(max(int(0.7 * len(masks)), 5), 20)
        drafted = [i for i in order if sure[i] > threshold][:limit] or order[:1]
        revoked: list[int] = []
        if len(drafted) > 1:
            likely = {}
            for i in [i for i in state.cells if i not in masks]:
                others = [*state.canvas[:i], *state.canvas[i + 1 :], *[MASK] * len(state.cells)]
                likely[i] = float(softmax(state.script((*others, i)))[state.canvas[i]])
            worst = sorted(likely, key=lambda i: (likely[i], i))[: last - 1]
            revoked = [i for i in worst if likely[i] < keep]
        for i in drafted:
            state.canvas[i] = tokens[i]
        for i in revoked:
            state.canvas[i] = MASK
        state.memory["last"] = len(drafted)
        return not state.masks

    return rule


@oracle_test("wino")
def wino() -> Iterator[Check]:
    """Every canvas equals the oracle's: default thresholds and others, blocks, sampling."""
    scripts = {
        "drifting": drifting(9.0),
        "steady": steady(4.5),
        "dense": dense(seed=7, spread=7.0),
    }
    cases = [
        Case("wino", revoking(0.6, 0.9), 40, 40),
        Case("wino:threshold=0.3,keep=0.5,block=10", revoking(0.3, 0.5), 10, 24),
        Case("wino:threshold=0.2", revoking(0.2, 0.9), 16, 16),
    ]
    num_returns = yield from equal_canvases(scripts, cases, (0.0, 0.7))
    yield Check("tokens are masked again", num_returns > 20, f"{num_returns} returns")
    plain = traced("wino:keep=0,threshold=0.5", CONFIDENT, 24)
    yield Check("with keep=0 nothing is masked again", returns(plain) == 0)


register_losses("wino", "wino", accuracy=0.08, passes=0.5, tasks=DETERMINED)
