"""Oracle test of remedi (arXiv:2509.23653): which tokens every step keeps; and passes on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, PROMPT, Logits, bidirectional
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
    revised,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK


def reflection(steps: int | None, *, by_confidence: bool = False) -> Rule:
    """Fill everything, keep the tokens of the largest logits, or of the largest confidences of
    `confidences`: as many as a schedule has filled."""

    def rule(state: Revision) -> bool:
        cells, count = state.cells, min(steps or len(state.cells), len(state.cells))
        quotas = [len(cells) // count + (k < len(cells) % count) for k in range(count)]
        tokens = {i: state.token(i) if i in state.masks else state.canvas[i] for i in cells}
        ranks = {i: float(state.row(i)[tokens[i]]) for i in cells}
        if by_confidence:
            ranks = {i: -float(state.script((*state.canvas, i)).max()) for i in cells}
        num_kept = sum(quotas[: state.block_step + 1])
        kept = sorted(cells, key=lambda i: (-ranks[i], i))[:num_kept]
        for i in cells:
            tokens[i] = tokens[i] if i in kept else MASK
        for i in cells:
            state.canvas[i] = tokens[i]
        return num_kept == len(cells)

    return rule


def with_confidences(decoder: str, script: Logits, length: int) -> list[list[int]]:
    """The canvases of the engine with a model that is the more confident the smaller its largest
    logit is."""
    with bidirectional(script) as llm:
        model: Any = llm.model
        model.has_confidences = True
        model.confidences = lambda hidden: -model.head(hidden).max(-1).astype(np.float64)
        answer = llm.generate(
            [*PROMPT], decoder=decoder, trace=True, max_tokens=length, ignore_eos=True
        )
    return [list(record["canvas"]) for record in answer.trace or ()]


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
    for decoder, by_confidence in (("remedi", True), ("remedi:rank=logit", False)):
        rule = reflection(None, by_confidence=by_confidence)
        found = with_confidences(decoder, scripts["drifting"], 40)
        expected = revised(scripts["drifting"], 40, 32, rule)
        yield Check(f"{decoder} equals the oracle on a model with confidences", found == expected)


register_losses("remedi", "remedi:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
