"""The encoders of GGUF's formats: bit-equal to the `gguf` package where it has them; the others are
close to the values."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.quantization.encoders import FORMATS, encode

#: Bounds of the relative error of normally distributed values. Without the search for scales, the
#: errors are 0.0787, 0.0383, 0.0188, 0.0796 and 0.0800.
SEARCHED = {"Q4_K": 0.0745, "Q5_K": 0.0372, "Q6_K": 0.0181, "IQ4_NL": 0.0778, "IQ4_XS": 0.0783}


def values() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((24, 512), np.float32) * np.float32(0.02)
    x[3] = 0
    x[4, :256] = 0.01
    x[5, :32] = -0.3
    x[6] = np.abs(x[6])
    x[7, 100] = 40
    return x


def decoded(x: np.ndarray, format: str) -> np.ndarray:
    return dequantize(Weight(format, *x.shape, encode(x, format)))


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in SEARCHED])
def test_blocks_are_those_of_gguf(format: str) -> None:
    expected = quants.quantize(values(), GGMLQuantizationType[format])
    assert np.array_equal(encode(values(), format), expected)


@pytest.mark.parametrize(("format", "limit"), SEARCHED.items())
def test_searched_scales_are_close(format: str, limit: float) -> None:
    x = np.random.default_rng(1).standard_normal((32, 512), np.float32)
    assert np.linalg.norm(decoded(x, format) - x) < limit * np.linalg.norm(x)


@pytest.mark.parametrize("format", SEARCHED)
def test_special_rows_are_close(format: str) -> None:
    """Rows of zeros, of one value, of one sign and with an outlier."""
    x = values()
    error = np.abs(decoded(x, format) - x).max(1)
    assert error[3] == 0
    assert error[4] < 0.004 and error[6] < 0.2 * x[6].max()
    assert (error <= 0.13 * np.abs(x).max(1)).all()


@pytest.mark.parametrize("format", SEARCHED)
def test_decoded_values_are_encoded_again_with_a_small_error(format: str) -> None:
    once = decoded(values(), format)
    twice = decoded(once, format)
    assert np.linalg.norm(twice - once) < 0.02 * np.linalg.norm(once)
