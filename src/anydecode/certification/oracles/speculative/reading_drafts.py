"""A draft model whose logits depend on everything that it attends to."""

from __future__ import annotations

import numpy as np

from anydecode.certification.rounds import blurred, wordy

PROMPTS = ("abcabcabdabcabcabd", "the cab had a bad cab and a dab", "h")


TARGET = wordy()


def context_logits(seen: tuple[int, ...]) -> np.ndarray:
    """Draft logits that depend on everything that a row attends to."""
    row: np.ndarray = blurred(TARGET, error=0.3)(seen).copy()
    row[97 + sum(seen) % 12] += 2.0
    return row
