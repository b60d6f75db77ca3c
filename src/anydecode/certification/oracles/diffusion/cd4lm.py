"""Oracle test of cd4lm (CD4LM, arXiv:2601.02236): a cap on the positions per pass, and end-of-text
tokens that are delayed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    StepState,
    UnmaskingRule,
    bidirectional,
    ending,
    naive,
    steps,
)
from anydecode.certification.oracles.diffusion.scripted_denoising import default_steps, same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import EOS, MASK


@oracle_test("cd4lm")
def cd4lm() -> Iterator[Check]:
    """A step unmasks at most `max_per_step` positions, four by default; end-of-text tokens are
    delayed until half the canvas is full."""

    def capped(state: StepState) -> list[int]:
        confident = [i for i in state.order() if state.max_probability(i) >= 0.5]
        return confident[:3] or state.order()[:1]

    def delayed_rule(threshold: float, max_per_step: int, length: int) -> UnmaskingRule:
        def delayed(state: StepState) -> list[int]:
            early = state.canvas.count(MASK) > length / 2
            rank = {
                i: -math.inf if early and p.argmax() == EOS else float(p.max())
                for i, p in state.probabilities.items()
            }
            order = sorted(rank, key=lambda i: (-rank[i], i))
            return [i for i in order if rank[i] >= threshold][:max_per_step] or order[:1]

        return delayed

    decoder = "cd4lm:threshold=0.5,max_per_step=3,block=12"
    yield same_steps("fills at most three", decoder, capped)
    script = ending()

    with bidirectional(script) as llm:
        text, filled = steps(llm, decoder.replace("12", "16"), 16, ignore_eos=False)
    tokens, expected = naive(script, 16, 16, delayed_rule(0.5, 3, 16))
    yield Check("end-of-text tokens are delayed", filled == expected[: len(filled)])
    yield Check("returns the text before the first end of text", text == tokens[: len(text)])
    free = naive(script, 16, 16, capped)[1]
    yield Check("without the delay the end comes sooner", free[: len(filled)] != filled)
    yield default_steps("cd4lm", delayed_rule(0.95, 4, 40))
    for length in (34, 35):  # near the middle, steps of four pass 15 and 17, or 17 and 18 positions
        with bidirectional(script) as llm:
            filled = steps(llm, "cd4lm", length, ignore_eos=False)[1]
        expected = naive(script, length, 32, delayed_rule(0.95, 4, length))[1]
        yield Check(
            f"the default delay is half of the canvas, {length} positions",
            filled == expected[: len(filled)],
        )


register_losses("cd4lm", "cd4lm", accuracy=0.05, passes=0.5)
