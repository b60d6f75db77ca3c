"""Queries whose heads are multiplied by a line in the logarithm of the position, as in Mistral
Large 4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Rope


@dataclass(eq=False)
class QueryScale:
    """The factors `slope * log(position + 1) + start` of each head, both float32 `[heads]`."""

    slope: np.ndarray
    start: np.ndarray

    def apply(self, backend: Backend, queries: Any, dim: int) -> Any:
        """The queries, heads of `dim` numbers, times their factors."""
        grown = backend.rope(queries, len(self.slope), _logarithm(dim))
        first, second = (np.repeat(x, dim) for x in (self.start - self.slope, self.slope))
        return backend.add(backend.multiply(queries, first), backend.multiply(grown, second))


@lru_cache(8)
def _logarithm(dim: int) -> Rope:
    """An embedding that rotates nothing: it multiplies by 1 + log(position + 1)."""
    return Rope(np.zeros(dim // 2, np.float32), growth=1.0)
