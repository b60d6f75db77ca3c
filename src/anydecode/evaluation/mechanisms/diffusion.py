"""The base samplers of diffusion models against their published rules, written down naively."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Random
from anydecode.decoders.diffusion.sdar import BlockSchedule
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, ThresholdUnmasking
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.denoising import (
    PROMPT,
    SURE,
    Board,
    Moment,
    Rule,
    accuracy_lost,
    answered,
    bidirectional,
    dense,
    digests,
    margin,
    naive,
    nats,
    random_model,
    share_of_differences,
    share_of_passes,
    steps,
    texts,
)
from anydecode.scoring.noise import Noise

SCORES: dict[str, Callable[[Moment, int], float]] = {
    "confidence": lambda m, i: m.sure(i),
    "margin": lambda m, i: margin(m.found[i]),
    "entropy": lambda m, i: -nats(m.found[i]),
}
#: Confidences around one half, and close to one.
VAGUE = dense(spread=4.0)


def order(m: Moment, name: str) -> list[int]:
    """The masks, best first."""
    return sorted(m.found, key=lambda i: (-SCORES[name](m, i), i))


def llada_rule(name: str, count: int) -> Rule:
    """The schedule of LLaDA: masks of the block over its steps, the remainder first."""

    def rule(m: Moment) -> list[int]:
        base, more = divmod(m.block_masks, min(count, m.block_masks))
        return order(m, name)[: base + (m.block_step < more)]

    return rule


@mechanism("llada")
def llada() -> Iterator[Check]:
    """Text and positions filled per pass, for every ranking, schedule and block."""
    with bidirectional(VAGUE) as llm:
        for name in SCORES:
            for block, count in ((4, 4), (4, 3), (6, 2), (12, 5), (5, 1)):
                decoder = f"llada:block={block},steps={count},remasking={name}"
                found = steps(llm, decoder, 12)
                expected = naive(VAGUE, 12, block, llada_rule(name, count))
                yield Check(f"{decoder} equals the oracle", found == expected)
        found = steps(llm, "llada:block=6,steps=3", 12, temperature=0.8, seed=5)
        rule = llada_rule("confidence", 3)
        expected = naive(VAGUE, 12, 6, rule, temperature=0.8, seed=5)
        yield Check("sampled: the un-noised probability of the noised token", found == expected)
        whole = steps(llm, "llada:block=0", 12)[1]
        yield Check("one position a pass without steps", [len(s) for s in whole] == [1] * 12)
        _, filled = steps(llm, "llada:block=0,remasking=random", 12, seed=3)
        coins = Noise(3).with_purpose("unmask")
        left, expected_order = set(range(3, 15)), []
        for step in range(12):
            expected_order.append(max(left, key=lambda i: coins.coin(i, step)))  # noqa: B023
            left.remove(expected_order[-1])
        yield Check("random order by the coin of place and step", sum(filled, []) == expected_order)


@measure("llada", "questions answered wrongly, one token per pass", samples=64, margin=0.1)
def llada_loss(samples: int) -> float:
    """On tasks with checkable answers."""
    return 1 - answered("llada:block=0", samples).accuracy


@measure("llada", "accuracy lost by blocks of eight", samples=64, margin=0.05)
def llada_block_loss(samples: int) -> float:
    """Semi-autoregressive blocks, against the whole canvas at once."""
    return accuracy_lost("llada:block=8", samples)


def dream_rule(name: str, count: int) -> Rule:
    """A share 1 - s/t of the masks along a grid from 1 to 0.001, all of them in the last pass."""

    def rule(m: Moment) -> list[int]:
        grid = np.linspace(1, 1e-3, count + 1)
        if m.block_step == count - 1:
            return list(m.found)
        share = 1 - grid[m.block_step + 1] / grid[m.block_step]
        return order(m, name)[: max(1, int(len(m.found) * share))]

    return rule


@mechanism("dream")
def dream() -> Iterator[Check]:
    """Text and positions filled per pass along the time grid, greedy and sampled."""
    with bidirectional(VAGUE, shift=1) as llm:
        for name in SCORES:
            for count in (1, 3, 5, 12):
                decoder = f"dream:steps={count},alg={name}"
                expected = naive(VAGUE, 12, 12, dream_rule(name, count))
                yield Check(f"{decoder} equals the oracle", steps(llm, decoder, 12) == expected)
            found = steps(llm, f"dream:steps=5,alg={name}", 12, temperature=0.7, seed=2)
            rule = dream_rule(name, 5)
            expected = naive(VAGUE, 12, 12, rule, temperature=0.7, seed=2, tempered=True)
            yield Check(f"{name}: scores after the temperature", found == expected)
        plain = steps(llm, "dream:steps=6", 12, seed=1)
        drawn = steps(llm, "dream:steps=6,alg_temperature=3.0", 12, seed=1)
        cold = steps(llm, "dream:steps=6,alg_temperature=0.001", 12, seed=1)
        yield Check("drawn positions are others", drawn[1] != plain[1])
        yield Check("at a low temperature they are the best", cold == plain)
        counts = []
        for seed in range(8):
            counts += [
                len(filled) for filled in steps(llm, "dream:steps=4,alg=origin", 16, seed=seed)[1]
            ]
        mean = float(np.mean(counts[::4]))
        yield Check("origin fills a quarter at first, by coins", 2.5 < mean < 5.5, f"mean {mean}")
        yield Check("and not the same number each time", len(set(counts[::4])) > 1)


@measure("dream", "accuracy lost against one token per pass, at full steps", samples=64, margin=0.1)
def dream_loss(samples: int) -> float:
    """By entropy, one token a pass: the same cost, so nothing may be lost but by the order."""
    return accuracy_lost("dream", samples)


def threshold_rule(m: Moment) -> list[int]:
    """Rank 1 always, every other position at 0.9 or above."""
    ranked = order(m, "confidence")
    return ranked[:1] + [i for i in ranked[1:] if m.sure(i) >= 0.9]


def factor_rule(m: Moment) -> list[int]:
    """The largest n with (n + 1)(1 - c_n) < 1.5, at least one."""
    ranked = order(m, "confidence")
    fits = [n for n, i in enumerate(ranked, 1) if (n + 1) * (1 - m.sure(i)) < 1.5]
    return ranked[: max([1, *fits])]


@mechanism("fast-dllm")
def fast_dllm() -> Iterator[Check]:
    """The threshold and the factor rule, and what each cache computes and keeps: a double whose
    rows remember what they saw tells a stale row from a fresh one."""
    with bidirectional(SURE) as llm:
        for name, rule in (("threshold=0.9", threshold_rule), ("factor=1.5", factor_rule)):
            for block in (5, 16):
                decoder = f"fast-dllm:{name},block={block},cache=none"
                found, expected = steps(llm, decoder, 16), naive(SURE, 16, block, rule)
                yield Check(f"{decoder} equals the oracle", found == expected)
                parallel = len(found[1]) < 16
                yield Check(f"{decoder} fills several at once", parallel, f"{len(found[1])} passes")
    found_by = []
    for kind in ("none", "prefix", "dual"):
        board = Board(SURE)
        counted: list[int] = []

        def look(
            canvas: list[int],
            block: range,
            opening: bool,
            kind: str = kind,
            board: Board = board,
            counted: list[int] = counted,
        ) -> dict[int, np.ndarray]:
            rows = range(len(canvas))
            if kind != "none" and not opening:
                rows = block if kind == "dual" else range(block.start, len(canvas))
            counted.append(len(rows))
            return board.look(canvas, rows, keep=opening and kind != "none")

        with digests(SURE) as llm:
            decoder = f"fast-dllm:block=8,cache={kind}"
            found = steps(llm, decoder, 24)
            rows = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True
            ).stats.rows
        expected = naive(SURE, 24, 8, threshold_rule, look=look)
        found_by.append(expected)
        yield Check(f"cache {kind} equals the oracle", found == expected)
        yield Check(f"cache {kind} computes {sum(counted)} rows", rows == sum(counted), str(rows))
    distinct = found_by[0] != found_by[1] != found_by[2] != found_by[0]
    yield Check("the double tells the caches apart", distinct)


@measure("fast-dllm", "accuracy lost by the threshold", samples=128, margin=0.02)
def fast_dllm_loss(samples: int) -> float:
    """Against one token per pass in the same blocks; nothing cached."""
    return accuracy_lost("fast-dllm:block=8,cache=none", samples, stepwise="llada:block=8")


@measure("fast-dllm", "passes of the threshold, against one token each", samples=128, margin=0.5)
def fast_dllm_passes(samples: int) -> float:
    """In the same blocks; nothing cached."""
    return share_of_passes("fast-dllm:block=8,cache=none", samples, stepwise="llada:block=8")


@measure("fast-dllm", "accuracy lost by the dual cache", samples=64, margin=0.1)
def fast_dllm_cache_loss(samples: int) -> float:
    """Where there is one right answer: what a cache forgets hurts most where words depend on each
    other."""
    return accuracy_lost("fast-dllm:block=8", samples, ("copy", "reverse"))


@measure("fast-dllm", "rows of the dual cache, against full passes", samples=64, margin=0.6)
def fast_dllm_rows(samples: int) -> float:
    """Passes that open a block included."""
    cached, full = (answered(f"fast-dllm:block=8{c}", samples) for c in ("", ",cache=none"))
    return cached.rows / full.rows


def sdar_rule(kind: str, size: int, count: int) -> Rule:
    """Quota size // count a pass, the remainder first; dynamic: all above 0.85 if as many."""

    def rule(m: Moment) -> list[int]:
        base, more = divmod(size, count)
        quota = base + (m.block_step < more)
        if kind == "sequential":
            return sorted(m.found)[:quota]
        sure = [i for i in m.found if m.sure(i) > 0.85]
        if kind == "dynamic" and len(sure) >= quota:
            return sure
        return order(m, "confidence")[:quota]

    return rule


@mechanism("sdar")
def sdar() -> Iterator[Check]:
    """Every strategy over an exact block cache, the prompt's last tokens within the first block."""
    with bidirectional(SURE, block_size=4) as llm:
        for kind in ("dynamic", "static", "sequential"):
            for count in (1, 3, 4):
                decoder = f"sdar:steps={count},remasking={kind}"
                found = steps(llm, decoder, 18)
                expected = naive(SURE, 18, 4, sdar_rule(kind, 4, count), aligned=True)
                yield Check(f"{decoder} equals the oracle", found == expected)
        found = steps(llm, "sdar", 18, temperature=0.9, seed=4)
        rule = sdar_rule("dynamic", 4, 4)
        expected = naive(SURE, 18, 4, rule, aligned=True, temperature=0.9, seed=4, tempered=True)
        yield Check("sampled: the tempered probability of the drawn token", found == expected)
    yield from exact_blocks("sdar", sdar_rule("dynamic", 4, 4))


def exact_blocks(key: str, rule: Rule) -> Iterator[Check]:
    """Finished blocks are kept clean of masks and seen as they are; what they cost is counted."""
    board = Board(SURE)
    rows: list[int] = []

    def look(canvas: list[int], block: range, opening: bool) -> dict[int, np.ndarray]:
        def sees(position: int) -> int:
            return (position // 4 + 1) * 4

        if opening:
            for start in range(len(board.tokens), block.start, 4):
                board.look(canvas, range(start, start + 4), keep=True, sees=sees)
                rows.append(4)
        rows.append(4)
        return board.look(canvas, block, keep=False, sees=sees)

    expected = naive(SURE, 18, 4, rule, prompt=list(range(30, 39)), aligned=True, look=look)
    with digests(SURE, block_size=4) as llm:
        options = {"prompt": list(range(30, 39))}
        found = steps(llm, key, 18, **options)
        answer = llm.generate(list(range(30, 39)), decoder=key, max_tokens=18, ignore_eos=True)
    yield Check("cached blocks equal the oracle's", found == expected)
    passes, counted = answer.stats.passes, answer.stats.rows
    yield Check("storing a block takes rows", counted == sum(rows), f"{counted} rows")
    yield Check("but no pass", passes == len(expected[1]), f"{passes} passes")


@mechanism("bd3-lm")
def bd3_lm() -> Iterator[Check]:
    """One position a pass, by the coins of place and step."""

    def rule(m: Moment, seed: int = 6) -> list[int]:
        coins = Noise(seed).with_purpose("unmask")
        return [max(m.found, key=lambda i: coins.coin(i, m.step))]

    with bidirectional(SURE, block_size=4) as llm:
        for temperature in (0.0, 1.0):
            found = steps(llm, "bd3-lm", 18, temperature=temperature, seed=6)
            expected = naive(SURE, 18, 4, rule, aligned=True, temperature=temperature, seed=6)
            yield Check(f"T={temperature} equals the oracle", found == expected)
        orders = {str(steps(llm, "bd3-lm", 18, seed=seed)[1]) for seed in range(3)}
        yield Check("the order is the seed's", len(orders) == 3)


@measure("sdar", "tokens that differ from full passes of the same blocks", samples=24, margin=0.0)
def sdar_cache_loss(samples: int) -> float:
    """The cache is exact: on a transformer of random weights, sampled."""
    dynamic = ThresholdOrSchedule(0.85, BlockSchedule(None))
    return _cache_loss(
        "sdar", Denoiser(FixedBlocks(), None, dynamic, NoCache(), tempered=True), samples
    )


@measure("bd3-lm", "tokens that differ from full passes of the same blocks", samples=24, margin=0.0)
def bd3_lm_cache_loss(samples: int) -> float:
    """The cache is exact: on a transformer of random weights, sampled."""
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


@measure("sdar", "passes, against one token each", samples=64, margin=0.8)
def sdar_passes(samples: int) -> float:
    """The dynamic rule, on the shipped block-diffusion model."""
    return share_of_passes("sdar", samples, stepwise="sdar:remasking=static", model="tiny-blocks")
