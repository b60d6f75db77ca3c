"""Oracle test of dimple (Dimple, arXiv:2505.16990): all confident positions, else the number of the
time grid; given tokens stay in place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    DigestCache,
    StepState,
    UnmaskingRule,
    bidirectional,
    dense,
    digests,
    naive,
    steps,
)
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("dimple")
def dimple() -> Iterator[Check]:
    """All confident positions, else the schedule's number; given tokens are there from the
    start."""

    def rule(count: int, threshold: float) -> UnmaskingRule:
        def choose(state: StepState) -> list[int]:
            confident = [i for i in state.probabilities if state.max_probability(i) > threshold]
            if confident:
                return confident
            masks, r = len(state.probabilities), len(state.probabilities) / state.block_masks
            grid = [1 - step / count for step in range(1, count)]
            quotas = [int(masks * (1 - s / r) + 1e-9) for s in grid if s < r]
            return state.order()[: next((q for q in quotas if q >= 1), masks)]

        return choose

    for count in (24, 8, 3):
        for threshold, script in ((0.7, CONFIDENT), (0.95, dense(spread=2.0))):
            decoder = f"dimple:threshold={threshold},steps={count}"
            name = f"a time grid of {count}, threshold {threshold}"
            yield same_steps(name, decoder, rule(count, threshold), 24, script)
    with bidirectional(CONFIDENT) as llm:
        text, filled = steps(llm, catalogue.build("dimple", priors={2: [65, 66], 9: "x"}), 12)
        yield Check("given tokens stay in place", (text[2:4], text[9]) == ([65, 66], ord("x")))
        touched = sorted(position - len(PROMPT) for one in filled for position in one)
        yield Check("given tokens are never filled", touched == [0, 1, 4, 5, 6, 7, 8, 10, 11])
    yield from _prefill(rule(40, 0.95))
    yield from _dual(rule(40, 0.95))


def _prefill(rule: UnmaskingRule) -> Iterator[Check]:
    """With prefill, the prompt sees itself only and is computed once."""
    prompt, cache, rows = list(range(30, 39)), DigestCache(CONFIDENT), [9]

    def forward(canvas: list[int], block: range, is_first_step: bool) -> dict[int, np.ndarray]:
        if not cache.tokens:
            cache.forward(canvas, range(9), keep=True, num_visible=lambda position: 9)
        rows.append(len(block))
        return cache.forward(canvas, block, keep=False)

    expected = naive(CONFIDENT, 40, 40, rule, prompt=prompt, forward=forward)
    with digests(CONFIDENT) as llm:
        actual = steps(llm, "dimple:prefill=true", 40, prompt=prompt)
        answer = llm.generate(prompt, decoder="dimple:prefill=true", max_tokens=40, ignore_eos=True)
    yield Check("prefill equals the oracle", actual == expected)
    yield Check("the prompt is computed once", answer.stats.rows == sum(rows), f"{sum(rows)} rows")


def _dual(rule: UnmaskingRule) -> Iterator[Check]:
    """With cache=dual, the rows of the prompt are those of the first pass."""
    prompt, cache, rows = list(range(30, 39)), DigestCache(CONFIDENT), list[int]()

    def forward(canvas: list[int], block: range, is_first_step: bool) -> dict[int, np.ndarray]:
        computed = range(len(canvas)) if is_first_step else block
        rows.append(len(computed))
        return cache.forward(canvas, computed, keep=is_first_step)

    expected = naive(CONFIDENT, 40, 40, rule, prompt=prompt, forward=forward)
    with digests(CONFIDENT) as llm:
        actual = steps(llm, "dimple:cache=dual", 40, prompt=prompt)
        answer = llm.generate(prompt, decoder="dimple:cache=dual", max_tokens=40, ignore_eos=True)
    yield Check("cache=dual equals the oracle", actual == expected)
    yield Check("the prompt's rows are cached", answer.stats.rows == sum(rows), f"{sum(rows)} rows")


register_losses("dimple", "dimple", accuracy=0.05, passes=0.5)
