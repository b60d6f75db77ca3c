"""Oracle test of longspec (LongSpec, arXiv:2502.17421): drafts of a model that attends to the sinks
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
from anydecode.certification.rounds import accepted, plain_token, rounds, scripted


@oracle_test("longspec")
def longspec() -> Iterator[Check]:
    """The draft model attends to the sinks and the window only, and caches no more than that."""
    for key, prompts, size, window, sinks in (
        ("longspec", ("h", LONG_PROMPT), 4, 512, 4),
        ("longspec:size=3,window=6,sinks=2", PROMPTS, 3, 6, 2),
    ):
        yield from _compare_drafts(key, prompts, size, window, sinks)
    sizes = [_max_used(count) for count in (60, 120)]
    yield Check("the cache size is constant", sizes[0] == sizes[1] <= 2 + 2 * 6 + 3, f"{sizes}")


def _compare_drafts(
    key: str, prompts: tuple[str, ...], size: int, window: int, sinks: int
) -> Iterator[Check]:
    for temperature in (0.0, 0.8):
        num_used, wrong, total = 0, 0, 0
        with scripted(TARGET, context_logits) as llm:
            pool = llm.engine.runners["draft"].pool
            for prompt in prompts:
                trace = rounds(llm, key, prompt, 30, temperature=temperature)
                first_kept, length = sinks, 0
                for one in trace:
                    while len(one.text) - length > window:
                        length += window
                        first_kept = max(first_kept, length - window)
                    drafts: list[int] = []
                    for _ in range(size):
                        text = [*one.text, *drafts]
                        # The scripted model rotates its logits by one token per hole in the
                        # positions.
                        row = np.roll(
                            context_logits((*text[:sinks], *text[first_kept:])), first_kept - sinks
                        )
                        drafts.append(plain_token(row, len(text), temperature))
                    wrong += one.tokens != drafts
                    length = len(one.text) + size - 1
                    first_kept = max(first_kept, length - window)
                    length = min(length, len(one.text) + len(one.accepted))
                total += accepted(trace)
                num_used = max(num_used, pool.num_used)
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(f"{key} at T={temperature}: drafts are accepted", total > 0, f"{total}")
        yield Check(f"{key}: all slots are freed", num_used == 0)


def _max_used(count: int) -> int:
    used = [0]

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        used.append(llm.engine.runners["draft"].pool.num_used)
        return TARGET(seen)

    with scripted(TARGET, draft) as llm:
        options: dict[str, Any] = {
            "decoder": "longspec:size=3,window=6,sinks=2",
            "ignore_eos": True,
        }
        llm.generate("abcabcabdabc" * 4, max_tokens=count, **options)
    return max(used)
