"""Oracle tests of the base samplers of diffusion models against naive implementations of their
published rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    DigestCache,
    StepState,
    UnmaskingRule,
    accuracy_lost,
    benchmark_results,
    bidirectional,
    dense,
    digests,
    entropy_nats,
    margin,
    naive,
    passes_ratio,
    random_model,
    share_of_differences,
    steps,
    texts,
)
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Random
from anydecode.decoders.diffusion.sdar import BlockSchedule
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, ThresholdUnmasking
from anydecode.sampling.noise import Noise

SCORES: dict[str, Callable[[StepState, int], float]] = {
    "confidence": lambda m, i: m.confidence(i),
    "margin": lambda m, i: margin(m.probabilities[i]),
    "entropy": lambda m, i: -entropy_nats(m.probabilities[i]),
}
#: Confidences around one half, and close to one.
UNCERTAIN = dense(spread=4.0)


def order(state: StepState, name: str) -> list[int]:
    """The masked positions by descending score; ties go to the leftmost."""
    return sorted(state.probabilities, key=lambda i: (-SCORES[name](state, i), i))


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


@measure("llada", "questions answered incorrectly, one token per pass", samples=64, margin=0.1)
def llada_loss(samples: int) -> float:
    """Measured on tasks with checkable answers."""
    return 1 - benchmark_results("llada:block=0", samples).accuracy


@measure("llada", "accuracy lost by blocks of eight", samples=64, margin=0.05)
def llada_block_loss(samples: int) -> float:
    """Semi-autoregressive blocks, against the whole canvas as one block."""
    return accuracy_lost("llada:block=8", samples)


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


def threshold_rule(state: StepState) -> list[int]:
    """The best position, and every other position with confidence of at least 0.9."""
    ranked = order(state, "confidence")
    return ranked[:1] + [i for i in ranked[1:] if state.confidence(i) >= 0.9]


def factor_rule(state: StepState) -> list[int]:
    """The largest n with (n + 1)(1 - c_n) < 1.5, at least one."""
    ranked = order(state, "confidence")
    fits = [n for n, i in enumerate(ranked, 1) if (n + 1) * (1 - state.confidence(i)) < 1.5]
    return ranked[: max([1, *fits])]


@oracle_test("fast-dllm")
def fast_dllm() -> Iterator[Check]:
    """The threshold and the factor rule, and the rows that each cache computes and stores. The
    model's rows depend on what they attended to, so that stale rows are detected."""
    with bidirectional(CONFIDENT) as llm:
        for name, rule in (("threshold=0.9", threshold_rule), ("factor=1.5", factor_rule)):
            for block in (5, 16):
                decoder = f"fast-dllm:{name},block={block},cache=none"
                actual, expected = steps(llm, decoder, 16), naive(CONFIDENT, 16, block, rule)
                yield Check(f"{decoder} equals the oracle", actual == expected)
                parallel = len(actual[1]) < 16
                yield Check(
                    f"{decoder} fills several positions per pass",
                    parallel,
                    f"{len(actual[1])} passes",
                )
    results = []
    for kind in ("none", "prefix", "dual"):
        cache = DigestCache(CONFIDENT)
        rows_per_pass: list[int] = []

        def forward(
            canvas: list[int],
            block: range,
            is_first_step: bool,
            kind: str = kind,
            cache: DigestCache = cache,
            rows_per_pass: list[int] = rows_per_pass,
        ) -> dict[int, np.ndarray]:
            rows = range(len(canvas))
            if kind != "none" and not is_first_step:
                rows = block if kind == "dual" else range(block.start, len(canvas))
            rows_per_pass.append(len(rows))
            return cache.forward(canvas, rows, keep=is_first_step and kind != "none")

        with digests(CONFIDENT) as llm:
            decoder = f"fast-dllm:block=8,cache={kind}"
            actual = steps(llm, decoder, 24)
            rows = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True
            ).stats.rows
        expected = naive(CONFIDENT, 24, 8, threshold_rule, forward=forward)
        results.append(expected)
        yield Check(f"cache {kind} equals the oracle", actual == expected)
        yield Check(
            f"cache {kind} computes {sum(rows_per_pass)} rows",
            rows == sum(rows_per_pass),
            str(rows),
        )
    distinct = results[0] != results[1] != results[2] != results[0]
    yield Check("the test model distinguishes the caches", distinct)


@measure("fast-dllm", "accuracy lost by the threshold", samples=128, margin=0.02)
def fast_dllm_loss(samples: int) -> float:
    """Against one token per pass in the same blocks; without a cache."""
    return accuracy_lost("fast-dllm:block=8,cache=none", samples, stepwise="llada:block=8")


@measure(
    "fast-dllm", "passes of the threshold relative to one token per pass", samples=128, margin=0.5
)
def fast_dllm_passes(samples: int) -> float:
    """In the same blocks; without a cache."""
    return passes_ratio("fast-dllm:block=8,cache=none", samples, stepwise="llada:block=8")


@measure("fast-dllm", "accuracy lost by the dual cache", samples=64, margin=0.1)
def fast_dllm_cache_loss(samples: int) -> float:
    """On tasks with one right answer; stale cache entries hurt most where tokens depend on each
    other."""
    return accuracy_lost("fast-dllm:block=8", samples, ("copy", "reverse"))


@measure("fast-dllm", "rows of the dual cache, relative to full passes", samples=64, margin=0.6)
def fast_dllm_rows(samples: int) -> float:
    """Includes the full passes at the start of each block."""
    cached, full = (
        benchmark_results(f"fast-dllm:block=8{c}", samples) for c in ("", ",cache=none")
    )
    return cached.rows / full.rows


def sdar_rule(kind: str, size: int, count: int) -> UnmaskingRule:
    """Quota size // count per pass, the remainder first; dynamic: all positions above 0.85 if they
    are at least the quota."""

    def rule(state: StepState) -> list[int]:
        base, more = divmod(size, count)
        quota = base + (state.block_step < more)
        if kind == "sequential":
            return sorted(state.probabilities)[:quota]
        confident = [i for i in state.probabilities if state.confidence(i) > 0.85]
        if kind == "dynamic" and len(confident) >= quota:
            return confident
        return order(state, "confidence")[:quota]

    return rule


@oracle_test("sdar")
def sdar() -> Iterator[Check]:
    """Every strategy over an exact block cache; the prompt's last tokens are part of the first
    block."""
    with bidirectional(CONFIDENT, block_size=4) as llm:
        for kind in ("dynamic", "static", "sequential"):
            for count in (1, 3, 4):
                decoder = f"sdar:steps={count},remasking={kind}"
                actual = steps(llm, decoder, 18)
                expected = naive(CONFIDENT, 18, 4, sdar_rule(kind, 4, count), aligned=True)
                yield Check(f"{decoder} equals the oracle", actual == expected)
        actual = steps(llm, "sdar", 18, temperature=0.9, seed=4)
        rule = sdar_rule("dynamic", 4, 4)
        expected = naive(
            CONFIDENT, 18, 4, rule, aligned=True, temperature=0.9, seed=4, tempered=True
        )
        yield Check(
            "sampled: the confidence is the tempered probability of the sampled token",
            actual == expected,
        )
    yield from exact_blocks("sdar", sdar_rule("dynamic", 4, 4))


def exact_blocks(key: str, rule: UnmaskingRule) -> Iterator[Check]:
    """Finished blocks are cached without masks and attended to unchanged; their rows are
    counted."""
    cache = DigestCache(CONFIDENT)
    rows: list[int] = []

    def forward(canvas: list[int], block: range, is_first_step: bool) -> dict[int, np.ndarray]:
        def num_visible(position: int) -> int:
            return (position // 4 + 1) * 4

        if is_first_step:
            for start in range(len(cache.tokens), block.start, 4):
                cache.forward(canvas, range(start, start + 4), keep=True, num_visible=num_visible)
                rows.append(4)
        rows.append(4)
        return cache.forward(canvas, block, keep=False, num_visible=num_visible)

    expected = naive(
        CONFIDENT, 18, 4, rule, prompt=list(range(30, 39)), aligned=True, forward=forward
    )
    with digests(CONFIDENT, block_size=4) as llm:
        options = {"prompt": list(range(30, 39))}
        actual = steps(llm, key, 18, **options)
        answer = llm.generate(list(range(30, 39)), decoder=key, max_tokens=18, ignore_eos=True)
    yield Check("cached blocks equal the oracle's", actual == expected)
    passes, num_rows = answer.stats.passes, answer.stats.rows
    yield Check("caching a block costs rows", num_rows == sum(rows), f"{num_rows} rows")
    yield Check(
        "caching a block costs no extra pass", passes == len(expected[1]), f"{passes} passes"
    )


@oracle_test("bd3-lm")
def bd3_lm() -> Iterator[Check]:
    """One position per pass, ordered by the noise of position and step."""

    def rule(state: StepState, seed: int = 6) -> list[int]:
        noise = Noise(seed).with_purpose("unmask")
        return [max(state.probabilities, key=lambda i: noise.coin(i, state.step))]

    with bidirectional(CONFIDENT, block_size=4) as llm:
        for temperature in (0.0, 1.0):
            actual = steps(llm, "bd3-lm", 18, temperature=temperature, seed=6)
            expected = naive(CONFIDENT, 18, 4, rule, aligned=True, temperature=temperature, seed=6)
            yield Check(f"T={temperature} equals the oracle", actual == expected)
        orders = {str(steps(llm, "bd3-lm", 18, seed=seed)[1]) for seed in range(3)}
        yield Check("the order depends on the seed", len(orders) == 3)


@measure("sdar", "tokens that differ from full passes over the same blocks", samples=24, margin=0.0)
def sdar_cache_loss(samples: int) -> float:
    """The cache is exact: sampled, on a transformer with random weights."""
    dynamic = ThresholdOrSchedule(0.85, BlockSchedule(None))
    return _cache_loss(
        "sdar", Denoiser(FixedBlocks(), None, dynamic, NoCache(), tempered=True), samples
    )


@measure(
    "bd3-lm", "tokens that differ from full passes over the same blocks", samples=24, margin=0.0
)
def bd3_lm_cache_loss(samples: int) -> float:
    """The cache is exact: sampled, on a transformer with random weights."""
    return _cache_loss(
        "bd3-lm", Denoiser(FixedBlocks(), Random(), ThresholdUnmasking(2.0), NoCache()), samples
    )


def _cache_loss(key: str, uncached: Denoiser, samples: int) -> float:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 9}
    with random_model(block_size=4) as llm:
        cached = texts(llm, key, samples, **options)
        return share_of_differences(cached, texts(llm, uncached, samples, **options))


@measure("sdar", "accuracy lost against one token per pass", samples=64, margin=0.05)
def sdar_loss(samples: int) -> float:
    """The dynamic rule, on the shipped block-diffusion model."""
    return accuracy_lost("sdar", samples, stepwise="sdar:remasking=static", model="tiny-blocks")


@measure("sdar", "passes relative to one token per pass", samples=64, margin=0.8)
def sdar_passes(samples: int) -> float:
    """The dynamic rule, on the shipped block-diffusion model."""
    return passes_ratio("sdar", samples, stepwise="sdar:remasking=static", model="tiny-blocks")
