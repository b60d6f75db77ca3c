"""Oracle test of dream (Dream 7B, arXiv:2508.15487): text and positions per pass along the time
grid, greedy and sampled; and the accuracy on tasks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    StepState,
    UnmaskingRule,
    accuracy_lost,
    bidirectional,
    naive,
    steps,
)
from anydecode.certification.oracles.diffusion.llada import UNCERTAIN
from anydecode.certification.oracles.diffusion.rankings import SCORES, order


def dream_rule(name: str, count: int) -> UnmaskingRule:
    """A share 1 - s/t of the masks along a time grid from 1 to 0.001; all remaining masks in the
    last pass."""

    def rule(state: StepState) -> list[int]:
        grid = np.linspace(1, 1e-3, count + 1)
        if state.block_step == count - 1:
            return list(state.probabilities)
        share = 1 - grid[state.block_step + 1] / grid[state.block_step]
        return order(state, name)[: max(1, int(len(state.probabilities) * share))]

    return rule


@oracle_test("dream")
def dream() -> Iterator[Check]:
    """Text and positions filled per pass along the time grid, greedy and sampled."""
    with bidirectional(UNCERTAIN, shift=1) as llm:
        for name in SCORES:
            for count in (1, 3, 5, 12):
                decoder = f"dream:steps={count},alg={name}"
                expected = naive(UNCERTAIN, 12, 12, dream_rule(name, count))
                yield Check(f"{decoder} equals the oracle", steps(llm, decoder, 12) == expected)
            actual = steps(llm, f"dream:steps=5,alg={name}", 12, temperature=0.7, seed=2)
            rule = dream_rule(name, 5)
            expected = naive(UNCERTAIN, 12, 12, rule, temperature=0.7, seed=2, tempered=True)
            yield Check(f"{name}: scores after the temperature", actual == expected)
        expected = naive(UNCERTAIN, 40, 40, lambda state: order(state, "entropy")[:1])
        actual = steps(llm, "dream", 40)
        yield Check(
            "by default one canvas, and one pass per position by entropy", actual == expected
        )
        plain = steps(llm, "dream:steps=6", 12, seed=1)
        sampled = steps(llm, "dream:steps=6,alg_temperature=3.0", 12, seed=1)
        nearly_greedy = steps(llm, "dream:steps=6,alg_temperature=0.001", 12, seed=1)
        yield Check("sampled positions differ from ranked ones", sampled[1] != plain[1])
        yield Check("at a low temperature they are the best ranked", nearly_greedy == plain)
        counts = []
        for seed in range(8):
            counts += [
                len(filled) for filled in steps(llm, "dream:steps=4,alg=origin", 16, seed=seed)[1]
            ]
        mean = float(np.mean(counts[::4]))
        yield Check(
            "origin fills about a quarter in the first step", 2.5 < mean < 5.5, f"mean {mean}"
        )
        yield Check("origin fills a varying number of positions", len(set(counts[::4])) > 1)


@measure("dream", "accuracy lost against one token per pass, at full steps", samples=64, margin=0.1)
def dream_loss(samples: int) -> float:
    """One token per pass, ranked by entropy; only the filling order differs from the baseline."""
    return accuracy_lost("dream", samples)
