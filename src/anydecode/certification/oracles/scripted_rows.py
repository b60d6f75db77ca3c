"""Rows of a scripted model, recomputed from the text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anydecode.models.scripted import ScriptedModel


def logits_after(model: ScriptedModel, tokens: Iterable[int]) -> np.ndarray:
    """float32 `[vocab_size]`, directly from the script."""
    return np.asarray(model.script(tuple(tokens)), np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 `[vocab_size]`."""
    shifted = logits.astype(np.float64) - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result
