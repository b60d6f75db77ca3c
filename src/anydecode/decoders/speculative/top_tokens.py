"""The largest logits of verified rows."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.library import largest


def top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """int64 `[rows, count]`: the ids of the `count` largest logits of each row of `[rows,
    vocab_size]`, falling, the lowest id first among equals."""
    return largest(logits, count)[0].astype(np.int64)
