"""A draft model whose logits depend on everything that it attends to."""

from __future__ import annotations

import numpy as np

from anydecode.certification.rounds import blurred, wordy

PROMPTS = ("abcabcabdabcabcabd", "the cab had a bad cab and a dab", "h")


#: Longer than the default windows and chunks of methods for long prompts.
LONG_PROMPT = bytes(np.random.default_rng(0).integers(97, 123, 1100).tolist()).decode()


TARGET = wordy()


def context_logits(seen: tuple[int, ...]) -> np.ndarray:
    """Draft logits that depend on everything that a row attends to."""
    row: np.ndarray = blurred(TARGET, error=0.3)(seen).copy()
    row[97 + sum(seen) % 12] += 2.0
    return row
