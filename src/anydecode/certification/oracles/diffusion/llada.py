"""Oracle test of llada (LLaDA, arXiv:2502.09992): text and positions per pass, for every ranking,
schedule and block size; and the accuracy on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    PROMPT,
    StepState,
    UnmaskingRule,
    accuracy_lost,
    benchmark_results,
    bidirectional,
    dense,
    naive,
    steps,
)
from anydecode.certification.oracles.diffusion.rankings import SCORES, order
from anydecode.models.scripted import EOS, MASK
from anydecode.sampling.noise import Noise

#: Confidences around one half, and close to one.
UNCERTAIN = dense(spread=4.0)


def llada_rule(name: str, count: int) -> UnmaskingRule:
    """LLaDA's schedule: the masks of the block divided evenly over its steps, the remainder in the
    first steps."""

    def rule(state: StepState) -> list[int]:
        base, more = divmod(state.block_masks, min(count, state.block_masks))
        return order(state, name)[: base + (state.block_step < more)]

    return rule


@oracle_test("llada")
def llada() -> Iterator[Check]:
    """Text and positions filled per pass, for every ranking, schedule and block size."""
    with bidirectional(UNCERTAIN) as llm:
        for name in SCORES:
            for block, count in ((4, 4), (4, 3), (6, 2), (12, 5), (5, 1)):
                decoder = f"llada:block={block},steps={count},remasking={name}"
                actual = steps(llm, decoder, 12)
                expected = naive(UNCERTAIN, 12, block, llada_rule(name, count))
                yield Check(f"{decoder} equals the oracle", actual == expected)
        actual = steps(llm, "llada:block=6,steps=3", 12, temperature=0.8, seed=5)
        rule = llada_rule("confidence", 3)
        expected = naive(UNCERTAIN, 12, 6, rule, temperature=0.8, seed=5)
        yield Check("sampled: the confidence is the probability without noise", actual == expected)
        actual = steps(llm, "llada", 40)
        expected = naive(UNCERTAIN, 40, 32, llada_rule("confidence", 32))
        yield Check(
            "by default blocks of 32, and one pass per position by confidence", actual == expected
        )
        whole = steps(llm, "llada:block=0", 12)[1]
        yield Check("one position per pass without `steps`", [len(s) for s in whole] == [1] * 12)
        _, filled = steps(llm, "llada:block=0,remasking=random", 12, seed=3)
        noise = Noise(3).with_purpose("unmask")
        left, expected_order = set(range(3, 15)), []
        for step in range(12):
            expected_order.append(max(left, key=lambda i: noise.coin(i, step)))  # noqa: B023
            left.remove(expected_order[-1])
        yield Check(
            "random order by the noise of position and step", sum(filled, []) == expected_order
        )

    yield from guidance()
    yield from ends()


def guidance() -> Iterator[Check]:
    """The logits, and weight times their difference from those of the canvas with a masked
    prompt."""
    for weight, temperature in ((0.5, 0.0), (2.0, 0.0), (1.0, 0.7)):

        def forward(
            canvas: list[int], block: range, is_first_step: bool, weight: float = weight
        ) -> dict[int, np.ndarray]:
            blind = [*[MASK] * len(PROMPT), *canvas[len(PROMPT) :]]
            rows = {}
            for position in block:
                with_prompt = UNCERTAIN((*canvas, position))
                without = UNCERTAIN((*blind, position))
                rows[position] = with_prompt + np.float32(weight) * (with_prompt - without)
            return rows

        rule = llada_rule("confidence", 3)
        options: dict[str, Any] = {"temperature": temperature, "seed": 5}
        expected = naive(UNCERTAIN, 12, 6, rule, forward=forward, **options)
        with bidirectional(UNCERTAIN) as llm:
            decoder = f"llada:block=6,steps=3,guidance={weight}"
            actual = steps(llm, decoder, 12, **options)
        yield Check(f"{decoder} equals the oracle at temperature {temperature}", actual == expected)


def ends() -> Iterator[Check]:
    """Tokens that end the text come last, or have no probability."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = UNCERTAIN(path).copy()
        row[EOS] = 30.0 if path[-1] % 2 else -30.0
        return row

    def without_end(canvas: list[int], block: range, is_first_step: bool) -> dict[int, np.ndarray]:
        rows = {position: script((*canvas, position)).copy() for position in block}
        for row in rows.values():
            row[EOS] = -np.inf
        return rows

    def last(state: StepState) -> list[int]:
        ranked = order(state, "confidence")
        others = [i for i in ranked if state.tokens[i] != EOS]
        return [*others, *sorted(set(ranked) - set(others))][:2]

    plain = naive(script, 12, 12, llada_rule("confidence", 6))
    for end, expected in (
        ("allowed", plain),
        ("last", naive(script, 12, 12, last)),
        ("never", naive(script, 12, 12, llada_rule("confidence", 6), forward=without_end)),
    ):
        with bidirectional(script) as llm:
            actual = steps(llm, f"llada:block=12,steps=6,end={end}", 12)
        yield Check(f"end={end} equals the oracle", actual == expected)
        if end != "allowed":
            yield Check(f"end={end} differs from the default", expected != plain)


@measure("llada", "questions answered incorrectly, one token per pass", samples=64, margin=0.1)
def llada_loss(samples: int) -> float:
    """Measured on tasks with checkable answers."""
    return 1 - benchmark_results("llada:block=0", samples).accuracy


@measure("llada", "accuracy lost by blocks of eight", samples=64, margin=0.05)
def llada_block_loss(samples: int) -> float:
    """Semi-autoregressive blocks, against the whole canvas as one block."""
    return accuracy_lost("llada:block=8", samples)
