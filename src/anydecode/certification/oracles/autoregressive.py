"""Oracle test of autoregressive: argmax of logits / T plus noise for every token, in one pass
each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.plain_tokens import PROMPT, plain_tokens
from anydecode.certification.rounds import scripted, wordy


@oracle_test("autoregressive")
def autoregressive() -> Iterator[Check]:
    """One pass per token, and the token that the formula gives."""
    for temperature in (0.0, 0.8):
        with scripted(wordy()) as llm:
            options: dict[str, Any] = {
                "max_tokens": 30,
                "temperature": temperature,
                "seed": 5,
                "ignore_eos": True,
            }
            answer = llm.generate(PROMPT, decoder="autoregressive", **options)
        same = answer.tokens == plain_tokens(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("one pass per token", answer.stats.passes == 30)
