"""Zero points of GPTQ, which version 1 of the format stores minus 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.kernels.formats import dequantize
from anydecode.models.loading import gptq


@pytest.mark.parametrize(
    ("version", "stored", "zero"),
    [("gptq", 127, 128), ("gptq", 9, 10), ("gptq", 255, 0), ("gptq_v2", 255, 255)],
)
def test_zero_points_of_8_bits(version: str, stored: int, zero: int) -> None:
    """32 inputs, four outputs and one group; a word has four fields, the lowest first."""
    codes = np.arange(128, dtype=np.uint8).reshape(32, 4)
    fields = np.ascontiguousarray(codes.reshape(8, 4, 4).swapaxes(1, 2))
    tensors: dict[str, np.ndarray] = {
        "x.qweight": fields.view("<i4")[..., 0],
        "x.qzeros": np.full((1, 4), stored, np.uint8).view("<i4"),
        "x.scales": np.full((1, 4), 0.5, np.float16),
    }
    settings: dict[str, Any] = {"bits": 8, "checkpoint_format": version}
    weight = gptq.read(tensors.__getitem__, tensors.__contains__, "x", settings)
    assert np.array_equal(dequantize(weight), 0.5 * (codes.T.astype(np.float32) - zero))
