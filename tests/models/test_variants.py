"""Variants of layers: the reference and the native kernels agree on the rows of each, on what these
store, and on the rows behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.benchmarks.passes import sequence_rows
from anydecode.certification.tiny import tiny_model
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import (
    PROPAGATE,
    STORE_ONLY,
    OutputSpec,
    ParallelLayers,
    Rows,
    SkippedParts,
    Variant,
)
from anydecode.kernels.library import load_library

LAYERS, HIDDEN, FIRST = 5, 64, 6
VARIANTS: dict[str, tuple[Variant, int]] = {
    "stored inputs": (STORE_ONLY, 0),
    "propagated states": (PROPAGATE, 2),
    "parallel layers": (ParallelLayers(2), 0),
    "skipped parts": (SkippedParts(frozenset({1, 3}), frozenset({2, 3})), 0),
}


def rows_of(variant: Variant, start: int) -> Rows:
    """Six rows as they are, three of the variant from layer `start` on, and two behind them."""
    rows = sequence_rows([7, 90, 3, 44, 5, 61, 17, 8, 29, 10, 11], 0, LAYERS)
    own = np.arange(len(rows)) // 3 == 2
    rows.variant, rows.variants = np.where(own, 0, -1).astype(np.int32), [variant]
    if variant in (STORE_ONLY, PROPAGATE):
        states = np.random.default_rng(3).standard_normal((len(rows), HIDDEN), np.float32)
        rows.tokens, rows.inputs = np.where(own, -1, rows.tokens).astype(np.int32), states
        rows.start = np.where(own, start, 0).astype(np.int32)
    return rows


@pytest.mark.parametrize("name", VARIANTS)
def test_both_backends_run_the_variant(name: str) -> None:
    pytest.importorskip("torch")
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    variant, start = VARIANTS[name]
    found: list[list[np.ndarray]] = []
    for backend, one in (("torch", variant), ("native", variant), ("native", None)):
        model = tiny_model(layers=LAYERS, backend=backend)
        rows = rows_of(variant, start)
        if one is None:
            rows.variant, rows.variants = None, []
        cache: Any = model.new_cache(16)
        output = model.run(rows, cache, OutputSpec(np.array([9, 10], np.int32)))
        stored = [
            to_host(one[FIRST:9]).copy() for one in (*cache.keys[start:], *cache.values[start:])
        ]
        found.append([to_host(output.logits).copy(), *stored])
    reference, native, plain = found
    for one, other in zip(reference, native, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    assert not np.allclose(native[0], plain[0], rtol=1e-2, atol=1e-2)
