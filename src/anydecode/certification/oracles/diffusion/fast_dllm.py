"""Oracle test of fast-dllm (Fast-dLLM, arXiv:2505.22618): the threshold and the factor rule, and
the rows that each cache computes; and accuracy, passes and rows on tasks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    DigestCache,
    StepState,
    accuracy_lost,
    benchmark_results,
    bidirectional,
    digests,
    naive,
    passes_ratio,
    steps,
)
from anydecode.certification.oracles.diffusion.rankings import order


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
    kinds = ("none", "prefix", "dual")
    cases = [(f"fast-dllm:block=8,cache={kind}", kind, 8, 24) for kind in kinds]
    cases += [
        ("fast-dllm", "dual", 32, 80),
        ("fast-dllm:block=8,cache=vicinity", "vicinity", 8, 64),
    ]
    for decoder, kind, block_size, length in cases:
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
            is_full = is_first_step or (kind == "vicinity" and len(rows_per_pass) < 4)
            near = 16 if kind == "vicinity" else 0
            rows = range(len(canvas))
            if kind != "none" and not is_full:
                stop = len(canvas) if kind == "prefix" else min(block.stop + near, len(canvas))
                rows = range(max(0, block.start - near), stop)
            rows_per_pass.append(len(rows))
            logits = cache.forward(canvas, rows, keep=is_full and kind != "none")
            return {i: row for i, row in logits.items() if i in block}

        with digests(CONFIDENT) as llm:
            actual = steps(llm, decoder, length)
            rows = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=length, ignore_eos=True
            ).stats.rows
        expected = naive(CONFIDENT, length, block_size, threshold_rule, forward=forward)
        results.append(expected)
        yield Check(f"{decoder} equals the oracle", actual == expected)
        yield Check(
            f"{decoder} computes {sum(rows_per_pass)} rows",
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
