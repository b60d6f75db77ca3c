"""Oracle test of longspec (LongSpec, arXiv:2502.17421): beams of a model that attends to the sinks
and the window only, and the size of its cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.reading_drafts import (
    LONG_PROMPT,
    PROMPTS,
    TARGET,
    context_logits,
)
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import accepted, rounds, scripted
from anydecode.sampling.noise import Noise


@oracle_test("longspec")
def longspec() -> Iterator[Check]:
    """The draft model attends to the sinks and the window only, and caches no more than that. Each
    level has the most probable beams. Samples under the rejection rule for chosen tokens follow the
    target."""
    for key, prompts, beams, window, sinks in (
        ("longspec", ("h", LONG_PROMPT), (2, 4), 512, 4),
        ("longspec:width=3,depth=3,window=6,sinks=2", PROMPTS, (3, 3), 6, 2),
    ):
        yield from _compare_drafts(key, prompts, beams, window, sinks)
    sizes = [_max_used(count) for count in (60, 120)]
    yield Check("the cache size is constant", sizes[0] == sizes[1] <= 2 + 2 * 6 + 9, f"{sizes}")
    yield from rejection_checks("longspec")


def _compare_drafts(
    key: str, prompts: tuple[str, ...], beams: tuple[int, int], window: int, sinks: int
) -> Iterator[Check]:
    for temperature in (0.0, 0.8):
        num_used, wrong, total, num_forks = 0, 0, 0, 0
        with scripted(TARGET, context_logits) as llm:
            pool = llm.engine.runners["draft"].pool
            for prompt in prompts:
                trace = rounds(llm, key, prompt, 30, temperature=temperature)
                first_kept, length = sinks, 0
                for one in trace:
                    while len(one.text) - length > window:
                        length += window
                        first_kept = max(first_kept, length - window)
                    wrong += one.paths != _beams(one.text, beams, sinks, first_kept, temperature)
                    num_forks += len({path[:1] for path in one.paths}) > 1
                    # The nodes of the last level are not in the draft model's cache.
                    length = len(one.text) + min(len(one.accepted), beams[1] - 1)
                    first_kept = max(first_kept, length - window)
                total += accepted(trace)
                num_used = max(num_used, pool.num_used)
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(f"{key} at T={temperature}: drafts are accepted", total > 0, f"{total}")
        yield Check(f"{key} at T={temperature}: beams fork", num_forks > 0, f"{num_forks}")
        yield Check(f"{key}: all slots are freed", num_used == 0)


def _beams(
    text: list[int], beams: tuple[int, int], sinks: int, first_kept: int, temperature: float
) -> list[tuple[int, ...]]:
    """The paths of all levels, from rows of what the draft model attends to."""
    width, depth = beams
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    tree: list[tuple[int, ...]] = []
    for _ in range(depth):
        options = []
        for weight, path in level:
            seen = [*text, *path]
            # The scripted model rotates its logits by one token per hole in the positions.
            row = np.roll(context_logits((*seen[:sinks], *seen[first_kept:])), first_kept - sinks)
            scores = row.astype(float) / (temperature or 1.0)
            top = np.sort(np.argsort(-scores, kind="stable")[:64])
            keys = scores[top]
            if temperature:
                keys = keys + Noise(5).gumbel(top, len(seen))
            keys = keys - keys.max()
            keys -= np.log(np.exp(keys).sum())
            options += [
                (weight + float(keys[at]), (*path, int(top[at]))) for at in np.argsort(-keys)
            ]
        level = sorted(options, key=lambda option: -option[0])[:width]
        tree += [path for _, path in level]
    return tree


def _max_used(count: int) -> int:
    used = [0]

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        used.append(llm.engine.runners["draft"].pool.num_used)
        return TARGET(seen)

    with scripted(TARGET, draft) as llm:
        options: dict[str, Any] = {
            "decoder": "longspec:width=3,depth=3,window=6,sinks=2",
            "ignore_eos": True,
        }
        llm.generate("abcabcabdabc" * 4, max_tokens=count, **options)
    return max(used)
