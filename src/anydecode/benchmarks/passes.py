"""Single passes of a model on one sequence, for benchmarks that time them or compare logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anydecode.kernels.interface import OutputSpec, Rows


def sequence_rows(tokens: Sequence[int], start: int, num_layers: int) -> Rows:
    """Rows of one sequence's `tokens` from position `start` on; position i is in slot i."""
    count = len(tokens)
    table = np.arange(start + count, dtype=np.int32)
    zeros = np.zeros(count, np.int32)
    return Rows(
        np.array(tokens, np.int32), table[start:], table[start:], [table], zeros,
        table[start:] + 1, np.zeros(0, np.int32), zeros, zeros, zeros,
        np.full(count, num_layers, np.int32),
    )  # fmt: skip


def varied_tokens(count: int) -> list[int]:
    """So many tokens, up to 100 different ones."""
    return [token % 100 + 5 for token in range(count)]


def first_logits(count: int) -> OutputSpec:
    """Asks for the logits of the first `count` rows."""
    return OutputSpec(np.arange(count, dtype=np.int32))


def prefill(model: Any, cache: Any, count: int) -> None:
    """Run one pass over `count` tokens, which fills the first `count` slots of `cache`."""
    rows = sequence_rows(varied_tokens(count), 0, model.spec.num_layers)
    model.run(rows, cache, first_logits(1))
