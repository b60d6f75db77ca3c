"""Oracle test of eoser-ass (Taming Masked Diffusion Language Models, arXiv:2509.23924): step sizes
that double, blocks at the end, and factors on end-of-text tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    PROMPT,
    VOCABULARY,
    Logits,
    StepState,
    UnmaskingRule,
    accuracy_lost,
    bidirectional,
    dense,
    ending,
    naive,
    passes_ratio,
    steps,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED
from anydecode.models.scripted import EOS


@oracle_test("eoser-ass")
def eoser_ass() -> Iterator[Check]:
    """Doubling step sizes, peeled blocks, and factors on end-of-text tokens."""
    with bidirectional(dense()) as llm:
        for length, blocks, expected in (
            (16, 1, [1, 2, 4, 9]),
            (24, 1, [1, 2, 4, 17]),
            (32, 3, [1, 2, 4, 8, 17]),
            (1, 1, [1]),
        ):
            decoder = f"eoser-ass:blocks={blocks}"
            filled = steps(llm, decoder, length)[1]
            yield Check(f"{length} masks in {expected}", [len(one) for one in filled] == expected)
        filled = steps(llm, "eoser-ass:blocks=3", 32)[1]
        starts = [min(one) - len(PROMPT) for one in filled[-2:]]
        yield Check("the peeled blocks are at the end", starts == [7, 15])
    script = ending()
    faint = fainter_than_ends()
    for decoder, first, length in (("eoser-ass:min_factor=0.1", 0.1, 16), ("eoser-ass", 0.01, 128)):
        logits = script if length == 16 else faint
        with bidirectional(logits) as llm:
            actual = steps(llm, decoder, length, ignore_eos=False)
        order = naive(logits, length, length, ascending_rule(first))[1]
        equal = actual[1] == order[: len(actual[1])]
        yield Check(f"{decoder}: end-of-text tokens are delayed", equal, f"{len(actual[1])} passes")
    for decoder, steps_of_block in (
        ("eoser-ass:schedule=uniform", 40),
        ("eoser-ass:schedule=uniform,steps=9", 9),
    ):
        with bidirectional(script) as llm:
            actual = steps(llm, decoder, 40, ignore_eos=False)
        order = naive(script, 40, 40, uniform_rule(steps_of_block))[1]
        yield Check(f"{decoder}: the factor grows", actual[1] == order[: len(actual[1])])


def ascending_rule(first: float) -> UnmaskingRule:
    """2^i in step i of floor(log2 n) steps, and all that remain in the last one; the factor of an
    end of text grows from `first` by (2^(i+1) - 1) / 2^steps."""

    def rule(state: StepState) -> list[int]:
        step, num_steps = state.block_step, int(np.log2(state.block_masks))
        factor = first + (1 - first) * min(1.0, (2 ** (step + 1) - 1) / 2**num_steps)
        order = state.order(lambda p: float(p.max()) * (factor if p.argmax() == EOS else 1.0))
        return order[: 2**step] if step < num_steps - 1 else order

    return rule


def fainter_than_ends() -> Logits:
    """A sure end of text in half of the positions; the confidences of the others go from 0.01 to
    0.9 in small steps, so that every change of the factor changes which positions are best."""
    levels = np.random.default_rng(7).permutation(np.geomspace(0.01, 0.9, 128))

    def logits(path: tuple[int, ...]) -> np.ndarray:
        index = path[-1] - len(PROMPT)
        row = np.zeros(VOCABULARY)
        row[EOS] = -30.0
        if index % 2 == 0 and index > 8:
            row[EOS] = 30.0
        else:
            level = levels[index % 128]
            row[97 + index % 20] = np.log(level * (VOCABULARY - 2) / (1 - level))
        return row.astype(np.float32)

    return logits


def uniform_rule(num_steps: int) -> UnmaskingRule:
    """Equally many per step; the factor of an end of text grows from 0.4 with the share of filled
    positions."""

    def rule(state: StepState) -> list[int]:
        total = state.block_masks
        progress = (total - len(state.probabilities)) / (total - 1)
        factor = 0.4 + 0.6 * min(1.0, progress)
        quota = total // num_steps + (state.block_step < total % num_steps)
        order = state.order(lambda p: float(p.max()) * (factor if p.argmax() == EOS else 1.0))
        return order[:quota]

    return rule


@measure("eoser-ass", "passes relative to one token per pass", samples=64, margin=0.25)
def eoser_passes(samples: int) -> float:
    """floor(log2 24) = 4 passes instead of up to 24."""
    return passes_ratio("eoser-ass", samples)


@measure("eoser-ass", "accuracy lost, tasks with one right answer", samples=63, margin=0.1)
def eoser_loss(samples: int) -> float:
    """The last pass fills half the canvas at once, which works only for tasks with one right
    answer."""
    return accuracy_lost("eoser-ass", samples, DETERMINED)
