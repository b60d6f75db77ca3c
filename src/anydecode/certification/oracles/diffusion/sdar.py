"""Oracle test of sdar (SDAR, arXiv:2510.06303): every strategy over an exact block cache; and
accuracy and passes of the shipped block-diffusion model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    DigestCache,
    StepState,
    UnmaskingRule,
    accuracy_lost,
    bidirectional,
    digests,
    naive,
    passes_ratio,
    steps,
)
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.certification.oracles.diffusion.rankings import order
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.sdar import BlockSchedule
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule


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


@measure("sdar", "tokens that differ from full passes over the same blocks", samples=24, margin=0.0)
def sdar_cache_loss(samples: int) -> float:
    """The cache is exact: sampled, on a transformer with random weights."""
    dynamic = ThresholdOrSchedule(0.85, BlockSchedule(None))
    return cache_loss(
        "sdar", Denoiser(FixedBlocks(), None, dynamic, NoCache(), tempered=True), samples
    )


@measure("sdar", "accuracy lost against one token per pass", samples=64, margin=0.05)
def sdar_loss(samples: int) -> float:
    """The dynamic rule, on the shipped block-diffusion model."""
    return accuracy_lost("sdar", samples, stepwise="sdar:remasking=static", model="tiny-blocks")


@measure("sdar", "passes relative to one token per pass", samples=64, margin=0.8)
def sdar_passes(samples: int) -> float:
    """The dynamic rule, on the shipped block-diffusion model."""
    return passes_ratio("sdar", samples, stepwise="sdar:remasking=static", model="tiny-blocks")
