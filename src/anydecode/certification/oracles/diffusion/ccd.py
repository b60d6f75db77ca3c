"""Oracle test of ccd (Coherent Contextual Decoding, arXiv:2512.02044): both rules, with fixed and
dynamic budgets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    StepState,
    UnmaskingRule,
    bidirectional,
    entropy_nats,
    steady,
    steps,
)
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses


@oracle_test("ccd")
def ccd() -> Iterator[Check]:
    """Both rules, with fixed and dynamic budgets."""

    def agreement(dynamic: bool, warm_up: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            before, candidates, reach = state.memory.get("ccd", ({}, set(), 1))
            order = state.order(lambda p: -entropy_nats(p))
            tokens = {i: int(p.argmax()) for i, p in state.probabilities.items()}
            chosen = order[:1]
            if state.block_step >= warm_up:
                agreed = [i for i in order[:reach] if i in candidates and before[i] == tokens[i]]
                if order[0] in candidates and agreed:
                    chosen = agreed if dynamic else agreed[:1]
                reach = min(reach + 1, 5)
            rest = [i for i in order if i not in chosen]
            state.memory["ccd"] = (tokens, set(rest[:reach]), reach)
            return chosen

        return rule

    def averaged(dynamic: bool, depth: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            history = state.memory.setdefault("history", [])
            history.append({i: state.probabilities[i] for i in state.order()[:4]})
            last = history[-depth:]
            stable = [
                i for i in state.probabilities if len(last) == depth and all(i in h for h in last)
            ]
            if not stable:
                return state.order(lambda p: -entropy_nats(p))[:1]
            ranked = sorted(
                stable, key=lambda i: (entropy_nats(np.mean([h[i] for h in last], axis=0)), i)
            )
            return ranked if dynamic else ranked[:1]

        return rule

    script = steady()
    for dynamic in (True, False):
        for warm_up in (0, 5):
            decoder = f"ccd:dynamic={str(dynamic).lower()},warm_up={warm_up}"
            yield same_steps(decoder, decoder, agreement(dynamic, warm_up), 24, script)
        for depth in (2, 3):
            decoder = f"ccd:rule=averaged,dynamic={str(dynamic).lower()},depth={depth}"
            yield same_steps(decoder, decoder, averaged(dynamic, depth), 24, script)
    with bidirectional(script) as llm:
        few = len(steps(llm, "ccd:warm_up=0", 24)[1])
        yield Check("a dynamic budget saves passes", few < 24, f"{few} of 24")


register_losses("ccd", "ccd:rule=averaged", accuracy=0.08, passes=0.7, tasks=DETERMINED)
