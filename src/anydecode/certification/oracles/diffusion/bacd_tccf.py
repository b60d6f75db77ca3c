"""Oracle test of bacd-tccf (arXiv:2602.09555): a threshold that follows the block's mean
confidence, and blocks that are smaller after the marker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    StepState,
    UnmaskingRule,
    bidirectional,
    steps,
)
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import EOS, MASK


@oracle_test("bacd-tccf")
def bacd_tccf() -> Iterator[Check]:
    """The threshold is the block's mean confidence within bounds; blocks shrink after the
    marker."""

    def rule_within(low: float, high: float) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            confidences: list[float] = state.memory.setdefault("confidences", [])
            if state.block_step == 0:
                confidences.clear()
            level = (
                float(np.mean(confidences))
                if confidences
                else max(state.max_probability(i) for i in state.probabilities)
            )
            chosen = [
                i
                for i in state.probabilities
                if state.max_probability(i) >= min(max(level, low), high)
            ] or state.order()[:1]
            confidences += [state.max_probability(i) for i in chosen]
            return chosen

        return rule

    def growing(path: tuple[int, ...]) -> np.ndarray:
        """Confidences from 0.4 that grow with the number of filled positions."""
        *seen, position = path
        row = np.zeros(259, np.float32)
        filled = sum(token != MASK for token in seen)
        row[97 + position % 20] = 4.5 + 0.2 * filled + 0.01 * (position % 7)
        row[EOS] = -30.0
        return row

    for low, high, script in ((0.3, 0.8, CONFIDENT), (0.1, 0.95, growing)):
        decoder = f"bacd-tccf:low={low},high={high},coarse=12"
        name = f"the threshold follows the block's confidence between {low} and {high}"
        yield same_steps(name, decoder, rule_within(low, high), script=script)

    def marked(path: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(259, np.float32)
        row[(ord("#") if path[-1] == 9 else ord("a"))] = 9.0
        row[EOS] = -30.0
        return row

    with bidirectional(marked) as llm:
        decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#")
        filled = steps(llm, decoder, 14)[1]
    yield Check("blocks are smaller after the marker", [len(f) for f in filled] == [8, 2, 2, 2])


register_losses("bacd-tccf", "bacd-tccf:low=0.9,high=0.95", accuracy=0.05, passes=0.5)
