"""Oracle test of dimple (Dimple, arXiv:2505.16990): all confident positions, else the number of the
time grid; given tokens stay in place."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    StepState,
    UnmaskingRule,
    bidirectional,
    dense,
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


register_losses("dimple", "dimple", accuracy=0.05, passes=0.5)
