"""Oracle test of fast-dllm-v2 (Fast-dLLM v2, arXiv:2509.26328): the token before each block, the
sub-blocks, the rows that each cache computes; and accuracy and passes on tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    DigestCache,
    Logits,
    StepState,
    UnmaskingRule,
    accuracy_lost,
    bidirectional,
    dense,
    digests,
    naive,
    passes_ratio,
    steps,
)
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.certification.oracles.diffusion.rankings import order
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.sub_blocks import SubBlocks
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, TopKUnmasking
from anydecode.models.scripted import MASK

Forward = Callable[[list[int], range, bool], dict[int, np.ndarray]]


def sub_block_rule(block: int, part: int, threshold: float, shifted: bool) -> UnmaskingRule:
    """The first position of a block alone if the row before the block predicts it; else those of
    the leftmost unfinished sub-block above the threshold, or the best of it."""

    def rule(state: StepState) -> list[int]:
        first = min(state.probabilities)
        if shifted and first > 0 and first % block == 0:
            return [first]
        start = first % block // part * part + first // block * block
        ranked = [i for i in order(state, "confidence") if i < start + part]
        return [i for i in ranked if state.confidence(i) > threshold] or ranked[:1]

    return rule


def shifted_forward(script: Logits) -> Forward:
    """Row i - 1 predicts position i, and attends to the end of its own block only."""

    def forward(canvas: list[int], block: range, is_first_step: bool) -> dict[int, np.ndarray]:
        return {
            i: script((*canvas[: block.start if i == block.start else block.stop], i))
            for i in block
            if canvas[i] == MASK
        }

    return forward


@oracle_test("fast-dllm-v2")
def fast_dllm_v2() -> Iterator[Check]:
    """The order of positions with shifted logits, for prompts that end in and between blocks."""
    for prompt in (PROMPT, tuple(range(30, 38)), tuple(range(30, 45))):
        for part, threshold in ((4, 0.8), (3, 0.5), (8, 1.0)):
            decoder = f"fast-dllm-v2:sub_block={part},threshold={threshold}"
            options = {"prompt": prompt, "aligned": True, "forward": shifted_forward(CONFIDENT)}
            rule = sub_block_rule(8, part, threshold, shifted=True)
            expected = naive(CONFIDENT, 21, 8, rule, **options)  # type: ignore[arg-type]
            with bidirectional(CONFIDENT, shift=1, block_size=8) as llm:
                actual = steps(llm, decoder, 21, prompt=prompt)
            name = f"{decoder} equals the oracle, {len(prompt)} tokens before it"
            yield Check(name, actual == expected)
    script = dense(spread=30.0)
    rule = sub_block_rule(32, 8, 0.95, shifted=True)
    expected = naive(script, 70, 32, rule, aligned=True, forward=shifted_forward(script))
    with bidirectional(script, shift=1, block_size=32) as llm:
        actual = steps(llm, "fast-dllm-v2", 70)
    yield Check("the default parameters are the published ones", actual == expected)
    yield Check("several masks per pass", len(expected[1]) < 60, f"{len(expected[1])} passes")
    yield from cached_rows()


def cached_rows() -> Iterator[Check]:
    """What each cache computes and keeps, on a model whose rows depend on what they attended to."""
    prompt, results = list(range(30, 37)), []
    for kind in ("none", "dual"):
        cache = DigestCache(CONFIDENT)
        rows: list[int] = []

        def num_visible(position: int) -> int:
            return (position // 8 + 1) * 8

        def forward(
            canvas: list[int],
            block: range,
            is_first_step: bool,
            kind: str = kind,
            cache: DigestCache = cache,
            rows: list[int] = rows,
        ) -> dict[int, np.ndarray]:
            if is_first_step and block.start:
                finished = range(block.start - 8, block.start)
                cache.forward(canvas, finished, keep=True, num_visible=num_visible)
                rows.append(8)
            first = canvas.index(MASK)
            start = first // 4 * 4
            computed = block
            if kind == "dual" and not is_first_step and canvas[start] != MASK:
                computed = range(start, start + 4)
            rows.append(len(computed))
            return cache.forward(canvas, computed, keep=kind == "dual", num_visible=num_visible) | {
                i: np.full(259, -1e9, np.float32) for i in block if i not in computed
            }

        rule = sub_block_rule(8, 4, 0.7, shifted=False)
        expected = naive(CONFIDENT, 25, 8, rule, prompt=prompt, aligned=True, forward=forward)
        decoder = f"fast-dllm-v2:sub_block=4,threshold=0.7,cache={kind}"
        with digests(CONFIDENT, block_size=8) as llm:
            actual = steps(llm, decoder, 25, prompt=prompt)
            answer = llm.generate(prompt, decoder=decoder, max_tokens=25, ignore_eos=True)
        results.append(expected)
        yield Check(f"{decoder} equals the oracle", actual == expected)
        found = answer.stats.rows
        yield Check(f"{decoder} computes {sum(rows)} rows", found == sum(rows), f"{found} rows")
        if kind == "dual":
            other = "fast-dllm:block=4,threshold=0.7,cache=hierarchical"
            with digests(CONFIDENT, block_size=8) as llm:
                actual = steps(llm, other, 25, prompt=prompt)
            yield Check("the hierarchical cache of another method", actual == expected)
    yield Check("the test model distinguishes the caches", results[0] != results[1])


@measure(
    "fast-dllm-v2", "tokens that differ from full passes over the same blocks", samples=24, margin=0
)
def fast_dllm_v2_cache_loss(samples: int) -> float:
    """The cache of finished blocks is exact: sampled, on a transformer with random weights and
    shifted logits."""
    unmask = ThresholdOrSchedule(0.95, TopKUnmasking())
    uncached = Denoiser(SubBlocks(8), None, unmask, NoCache(), tempered=True)
    return cache_loss("fast-dllm-v2", uncached, samples, shift=1)


@measure("fast-dllm-v2", "accuracy lost against one token per pass", samples=64, margin=0.05)
def fast_dllm_v2_loss(samples: int) -> float:
    """On the shipped block-diffusion model, whose logits are in place."""
    return accuracy_lost(
        "fast-dllm-v2", samples, stepwise="sdar:remasking=static", model="tiny-blocks"
    )


@measure("fast-dllm-v2", "passes relative to one token per pass", samples=64, margin=0.8)
def fast_dllm_v2_passes(samples: int) -> float:
    """On the shipped block-diffusion model, whose logits are in place."""
    return passes_ratio(
        "fast-dllm-v2", samples, stepwise="sdar:remasking=static", model="tiny-blocks"
    )
