"""Oracle test of prophet (Diffusion Language Models Know the Answer Before Decoding,
arXiv:2508.19982): one token per pass until the mean logit gap of the answer is large."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    StepState,
    UnmaskingRule,
    bidirectional,
    naive,
    softmax,
    steps,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses


@oracle_test("prophet")
def prophet() -> Iterator[Check]:
    """One token per pass until the mean logit gap of the answer is large, then all."""

    def rule_over(start: int, count: int, gaps: tuple[float, ...]) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            answer = range(len(PROMPT) + start, len(PROMPT) + start + count)
            top_two = [np.sort(softmax(CONFIDENT((*state.canvas, i))))[-2:] for i in answer]
            gap = float(np.mean([math.log(first / second) for second, first in top_two]))
            progress = 1 - len(state.probabilities) / state.block_masks
            third = 0 if progress < 0.33 else 1 if progress < 0.67 else 2
            return list(state.probabilities) if gap >= gaps[third] else state.order()[:1]

        return rule

    with bidirectional(CONFIDENT) as llm:
        for start, count, gaps in (
            (0, 16, (9.0, 6.0, 3.0)),
            (4, 3, (9.0, 6.0, 3.0)),
            (12, 4, (9.0, 6.0, 3.0)),
            (0, 16, (2.0, 99.0, 99.0)),
            (0, 16, (99.0, 2.0, 99.0)),
        ):
            parameters = "early={},middle={},late={},block=16".format(*gaps)
            actual = steps(llm, f"prophet:{parameters},start={start},count={count}", 16)
            expected = naive(CONFIDENT, 16, 16, rule_over(start, count, gaps))
            yield Check(f"fills the rest at pass {len(actual[1])} of 16", actual == expected)
        never = steps(llm, "prophet:early=1e9,middle=1e9,late=1e9,block=16", 16)
        stepwise = steps(llm, "llada:block=16", 16)
        yield Check("if no gap is large enough, one token per pass", never == stepwise)


register_losses(
    "prophet",
    "prophet:early=16,middle=14,late=12",
    accuracy=0.08,
    passes=0.95,
    tasks=DETERMINED,
)
