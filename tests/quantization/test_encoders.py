"""The encoders of GGUF's formats: bit-equal to the `gguf` package where it has them; the others are
close to the values."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.quantization.encoders import FORMATS, WEIGHED, encode

#: Bounds of the relative error of normally distributed values. Without the search for scales, the
#: errors of Q4_K to IQ4_XS are 0.0787, 0.0383, 0.0188, 0.0796 and 0.0800. With the quantiser of
#: llama.cpp 11434, those of IQ1 to IQ3 are 0.484, 0.450, 0.343, 0.301, 0.265, 0.214 and 0.166.
SEARCHED = {
    "Q2_K": 0.36, "Q3_K": 0.165, "Q4_K": 0.0745, "Q5_K": 0.0372, "Q6_K": 0.0181, "IQ4_NL": 0.0778,
    "IQ4_XS": 0.0783, "NVFP4": 0.0885, "IQ1_S": 0.447, "IQ1_M": 0.415, "IQ2_XXS": 0.329,
    "IQ2_XS": 0.289, "IQ2_S": 0.241, "IQ3_XXS": 0.18, "IQ3_S": 0.131,
}  # fmt: skip


#: Bounds of the largest error of a row over its largest magnitude, where they are above 0.13.
LIMITS = {
    "Q2_K": 0.5, "Q3_K": 0.25, "NVFP4": 0.17, "IQ1_S": 0.62, "IQ1_M": 0.57, "IQ2_XXS": 0.73,
    "IQ2_XS": 0.42, "IQ2_S": 0.36, "IQ3_XXS": 0.33, "IQ3_S": 0.22,
}  # fmt: skip


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
    limit = LIMITS.get(format, 0.13)
    assert (error <= limit * np.abs(x).max(1)).all()
    if limit == 0.13:
        assert error[4] < 0.004 and error[6] < 0.2 * x[6].max()


@pytest.mark.parametrize("format", SEARCHED)
def test_decoded_values_are_encoded_again_with_a_small_error(format: str) -> None:
    once = decoded(values(), format)
    twice = decoded(once, format)
    assert np.linalg.norm(twice - once) < 0.02 * np.linalg.norm(once)


@pytest.mark.parametrize("format", WEIGHED)
def test_an_importance_matrix_lowers_the_error_of_important_inputs(format: str) -> None:
    """Rejects an importance of other columns, and one that is not read."""
    x = np.random.default_rng(3).standard_normal((16, 512), np.float32)
    importance = np.random.default_rng(4).random(512, np.float32) ** 8

    def error(weights: np.ndarray | None) -> float:
        data = encode(x, format, weights)
        found = dequantize(Weight(format, *x.shape, data))
        return float((((found - x) ** 2) * importance).sum())

    # Formats that search for scales only with an importance matrix gain by that alone.
    unweighted = error(None if format in SEARCHED else np.ones(512, np.float32))
    assert error(importance) < 0.95 * min(unweighted, error(None))
    assert error(importance[::-1].copy()) > unweighted


@pytest.mark.parametrize("format", WEIGHED)
def test_inputs_that_are_never_used_keep_their_values(format: str) -> None:
    x = np.random.default_rng(5).standard_normal((4, 256), np.float32)
    data = encode(x, format, np.zeros(256, np.float32))
    found = dequantize(Weight(format, *x.shape, data))
    assert np.linalg.norm(found - x) < 1.2 * np.linalg.norm(decoded(x, format) - x)


@pytest.mark.parametrize("format", WEIGHED)
def test_the_package_gguf_reads_the_blocks(format: str) -> None:
    x = values()
    for importance in (None, np.arange(1, 513, dtype=np.float32)):
        data = encode(x, format, importance)
        expected = dequantize(Weight(format, *x.shape, data))
        assert np.array_equal(quants.dequantize(data, GGMLQuantizationType[format]), expected)


def test_scales_of_nvfp4_are_searched() -> None:
    """Less error than scales that map the largest magnitude of 16 numbers to 6, in the range where
    E4M3 has all its bits and in that where it has fewer."""
    for size, share in ((1.0, 0.97), (0.02, 0.97)):
        x = np.random.default_rng(7).standard_normal((64, 256), np.float32) * np.float32(size)
        parts = x.reshape(-1, 16)
        scale = (np.abs(parts).max(1, keepdims=True) / 6).astype(float8_e4m3fn).astype(np.float32)
        nearest = (parts / scale).astype(float4_e2m1fn).astype(np.float32) * scale
        assert np.linalg.norm(decoded(x, "NVFP4") - x) < share * np.linalg.norm(nearest - parts)


@pytest.mark.parametrize("format", ["IQ2_XXS", "IQ3_XXS", "IQ3_S"])
def test_no_other_point_of_the_grid_is_nearer(format: str) -> None:
    """Every value of the bytes that select points, by the decoder. Points for equal weights, or for
    an importance of other columns, are rejected."""
    x = np.random.default_rng(8).standard_normal((1, 256), np.float32)
    importance = np.random.default_rng(9).random(256, np.float32) ** 4 + np.float32(0.01)
    spread = np.sqrt(2 * (x * x).mean() + x * x)  # larger values count more
    offsets = range(2, 66)
    if format == "IQ2_XXS":  # four bytes of points, four of signs
        offsets = [offset for offset in offsets if (offset - 2) % 8 < 4]

    def is_best(data: np.ndarray) -> bool:
        best = []
        for offset in offsets:
            others = np.repeat(data, 256, axis=0)
            others[:, offset] = np.arange(256)
            found = dequantize(Weight(format, 256, 256, others))
            errors = (importance * spread * (found - x) ** 2).sum(1, dtype=np.float64)
            best.append(errors[data[0, offset]] <= errors.min() * (1 + 1e-6))
        return all(best)

    assert is_best(encode(x, format, importance))
    wrong = [encode(x, format), encode(x, format, importance[::-1].copy())]
    assert not any(map(is_best, wrong))


def test_signs_are_even_where_the_format_has_seven_of_eight() -> None:
    """The sign of the least important value changes; a wrong twin changes the first one."""
    x = np.abs(np.random.default_rng(10).standard_normal((4, 256), np.float32)) + np.float32(0.5)
    x[:, ::8] *= -4
    x[:, 5::8] = 0.25
    for format in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ2_S", "IQ3_S"):
        signs = np.sign(decoded(x, format)).reshape(4, -1, 8)
        assert (signs[..., 0] == -1).all() and (np.delete(signs, (0, 5), 2) == 1).all()
        assert (signs[..., 5] == (1 if format.endswith("_S") else -1)).all()
