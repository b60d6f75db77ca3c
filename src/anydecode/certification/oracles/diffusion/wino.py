"""Oracle test of wino (arXiv:2507.18578): which masks every step fills and which tokens it masks
again, given rows that do not see their own position; and accuracy and passes on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, dense, softmax, steady
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Revision,
    Rule,
    returns,
    revised,
    traced,
)
from anydecode.certification.oracles.diffusion.task_losses import register_losses
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
    num_returns = 0
    for name, script in (
        ("drifting", drifting(9.0)),
        ("steady", steady(4.5)),
        ("dense", dense(seed=7, spread=7.0)),
    ):
        for decoder, threshold, keep, block, length in (
            ("wino", 0.6, 0.9, 40, 40),
            ("wino:threshold=0.3,keep=0.5,block=10", 0.3, 0.5, 10, 24),
            ("wino:threshold=0.2", 0.2, 0.9, 16, 16),
        ):
            for temperature in (0.0, 0.7):
                options: dict[str, Any] = {"temperature": temperature, "seed": 3}
                expected = revised(script, length, block, revoking(threshold, keep), **options)
                actual = traced(decoder, script, length, **options)
                name_of = f"{decoder} equals the oracle, {name}, T={temperature}"
                yield Check(name_of, actual == expected)
                num_returns += returns(actual)
    yield Check("tokens are masked again", num_returns > 20, f"{num_returns} returns")
    plain = traced("wino:keep=0,threshold=0.5", CONFIDENT, 24)
    yield Check("with keep=0 nothing is masked again", returns(plain) == 0)


register_losses("wino", "wino", accuracy=0.1, passes=0.5)
