"""Oracle test of p2 (Path Planning, arXiv:2502.03540): which positions every step masks; and passes
on tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, PROMPT, Logits, dense, softmax
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
    returns,
    revised,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel


def path_planning(steps: int, eta: float = 1.0, planner: Logits | None = None) -> Rule:
    """Step k of S leaves floor(n (1 - (k + 1) / S)) masks: those of the least sure samples. Where a
    token is, the planner's log-probability of the sample counts, times eta."""

    def rule(state: Revision) -> bool:
        fresh = {i: state.token(i) for i in state.cells}
        whole = [fresh.get(i, token) for i, token in enumerate(state.canvas)]
        sure = {i: math.log(state.probability(i, fresh[i])) for i in state.cells}
        for i in state.cells:
            if state.canvas[i] == MASK:
                continue
            if planner is not None:
                sure[i] = math.log(softmax(planner((*whole, i)))[fresh[i]])
            sure[i] *= eta
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
        Case("p2:steps=6,eta=3", path_planning(6, 3.0), 20, 20),
        Case("p2:steps=6,eta=0.3", path_planning(6, 0.3), 20, 20),
    ]
    num_returns = yield from equal_canvases(scripts, cases)
    yield Check("tokens are masked again", num_returns > 10, f"{num_returns} returns")
    other = dense(seed=11, spread=5.0)
    counts = []
    for eta in (0.0, 0.5, 1.0, 4.0):
        for temperature in (0.0, 0.8):
            rule = path_planning(7, eta, other)
            expected = revised(scripts["drifting"], 18, 9, rule, temperature=temperature, seed=3)
            actual = _planned(scripts["drifting"], other, eta, temperature)
            name = f"a planner of its own, eta={eta}, T={temperature}: equal to the oracle"
            yield Check(name, actual == expected)
            counts.append(returns(actual))
    name = "a planner masks tokens again, but none with eta=0"
    yield Check(name, counts[0] == counts[1] == 0 < min(counts[2:]), f"{counts}")


def _planned(script: Logits, planner: Logits, eta: float, temperature: float) -> list[list[int]]:
    """The engine's canvases, with a draft model that plans."""
    models = [ScriptedModel(given, causal=False) for given in (script, planner)]
    decoder = f"p2:steps=7,block=9,planner=draft,eta={eta}"
    with LLM(models[0], tokenizer=ByteTokenizer(), draft=models[1], cache_positions=4096) as llm:
        answer = llm.generate(
            list(PROMPT), decoder=decoder, max_tokens=18, temperature=temperature, seed=3,
            ignore_eos=True, trace=True,
        )  # fmt: skip
    return [list(record["canvas"]) for record in answer.trace or ()]


register_losses("p2", "p2:steps=8", accuracy=0.25, passes=0.7, tasks=DETERMINED)
