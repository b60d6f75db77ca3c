"""Oracle test of cd4lm (CD4LM, arXiv:2601.02236): a cap on the positions per pass, and end-of-text
tokens that are delayed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, bidirectional, ending, naive, steps
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import EOS


@oracle_test("cd4lm")
def cd4lm() -> Iterator[Check]:
    """At most three at a time; end-of-text tokens are delayed until half the canvas is full."""

    def capped(state: StepState) -> list[int]:
        confident = [i for i in state.order() if state.max_probability(i) >= 0.5]
        return confident[:3] or state.order()[:1]

    decoder = "cd4lm:threshold=0.5,max_per_step=3,block=12"
    yield same_steps("fills at most three", decoder, capped)
    script = ending()

    def delayed(state: StepState) -> list[int]:
        early = len(state.probabilities) > state.block_masks / 2
        rank = {
            i: -math.inf if early and p.argmax() == EOS else float(p.max())
            for i, p in state.probabilities.items()
        }
        order = sorted(rank, key=lambda i: (-rank[i], i))
        return [i for i in order if rank[i] >= 0.5][:3] or order[:1]

    with bidirectional(script) as llm:
        text, filled = steps(llm, decoder.replace("12", "16"), 16, ignore_eos=False)
    tokens, expected = naive(script, 16, 16, delayed)
    yield Check("end-of-text tokens are delayed", filled == expected[: len(filled)])
    yield Check("returns the text before the first end of text", text == tokens[: len(text)])
    free = naive(script, 16, 16, capped)[1]
    yield Check("without the delay the end comes sooner", free[: len(filled)] != filled)


register_losses("cd4lm", "cd4lm", accuracy=0.05, passes=0.5)
