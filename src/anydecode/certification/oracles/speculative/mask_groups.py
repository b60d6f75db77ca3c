"""Scripted targets that predict from mask tokens, for oracle tests of the methods that draft with
them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.rounds import TracedRound, blurred, rounds, scripted, wordy
from anydecode.models.scripted import MASK

TARGET = wordy()
BLURRED = blurred(TARGET, error=1.5)
PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


def masked_logits(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of a target that knows masks: after masks, those of the text with tokens that are
    probable in place of the masks, with an error; the mask itself is the most probable token."""
    text = [token for token in seen if token != MASK]
    if len(text) == len(seen):
        return TARGET(seen)
    for _ in range(len(seen) - len(text)):
        text.append(int(TARGET(tuple(text)).argmax()))
    row = BLURRED(tuple(text))
    row[MASK] = 30.0
    return row


def open_llm() -> LLM:
    """An engine with the target `masked_logits`."""
    return scripted(masked_logits)


def traced(key: str, temperature: float) -> list[list[TracedRound]]:
    """The rounds of `key` after each of `PROMPTS`."""
    with open_llm() as llm:
        return [rounds(llm, key, prompt, temperature=temperature) for prompt in PROMPTS]


def mask_rows(prefix: Seq[int], count: int) -> list[np.ndarray]:
    """The logits of each of `count` masks behind `prefix`, without the mask token."""
    rows = [masked_logits((*prefix, *[MASK] * (number + 1))).copy() for number in range(count)]
    for row in rows:
        row[MASK] = -np.inf
    return rows


def with_groups(paths: Seq[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The candidates' `paths`, and `count` masks behind each of them and behind the text."""
    groups = [(*path, *[MASK] * (number + 1)) for path in ((), *paths) for number in range(count)]
    return [*paths, *groups]
