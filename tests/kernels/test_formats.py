"""Weight formats against the arithmetic of the `gguf` package, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from anydecode.kernels import formats
from anydecode.kernels.grids import GRID_FORMATS, grid
from anydecode.kernels.interface import FORMATS, Weight
from block_formats import set_scales

PACKED = [name for name in FORMATS if formats.is_packed(name)]


def random_weight(format: str, rows: int = 37, blocks: int = 3, seed: int = 0) -> Weight:
    """Random bytes, with finite float16 scales."""
    values, size = formats.BLOCKS[format]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    set_scales(format, data, generator.standard_normal((rows, blocks)))
    return Weight(format, rows, blocks * values, data.reshape(rows, -1), "random")


def reference(weight: Weight) -> np.ndarray:
    return quants.dequantize(weight.data, GGMLQuantizationType[weight.format])


@pytest.mark.parametrize("format", PACKED)
def test_dequantisation_is_bit_equal_to_gguf(format: str) -> None:
    weight = random_weight(format)
    ours = formats.dequantize(weight)
    assert np.array_equal(ours.view(np.uint32), reference(weight).view(np.uint32))


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, 65504.0, -1.5])
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("format", PACKED)
def test_extreme_blocks_are_bit_equal_to_gguf(format: str, byte: int, scale: float) -> None:
    values, size = formats.BLOCKS[format]
    blocks = np.full((3, size), byte, np.uint8)
    set_scales(format, blocks, np.full(3, scale))
    weight = Weight(format, 3, values, blocks)
    with np.errstate(over="ignore"):
        expected = reference(weight)
    assert np.array_equal(formats.dequantize(weight).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("format", GRID_FORMATS)
def test_grids_have_a_point_for_every_index(format: str) -> None:
    """Whatever the bytes, no index leaves the grid."""
    points = grid(format)
    size = {"IQ1_S": 2048, "IQ1_M": 2048, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_S": 512}
    assert points.shape == (size.get(format, 256), 4 if format.startswith("IQ3") else 8)
    assert len(np.unique(points, axis=0)) == len(points)
    with pytest.raises(ValueError, match="read-only"):
        points[0] = 1


@pytest.mark.parametrize("format", PACKED)
def test_a_changed_bit_is_detected(format: str) -> None:
    """Flipping one bit of one code makes the comparison above fail."""
    weight = random_weight(format)
    expected = reference(weight).copy()
    weight.data[5, 17] ^= 16
    assert not np.array_equal(formats.dequantize(weight), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_sizes_are_those_of_gguf(format: str) -> None:
    from gguf.constants import GGML_QUANT_SIZES

    assert formats.BLOCKS[format] == GGML_QUANT_SIZES[GGMLQuantizationType[format]]


@pytest.mark.parametrize("format", PACKED)
def test_dequantised_rows_equal_the_whole(format: str) -> None:
    weight = random_weight(format)
    rows = [36, 0, 7, 7]
    assert np.array_equal(formats.dequantize_rows(weight, rows), formats.dequantize(weight)[rows])
    assert formats.dequantize_rows(weight, np.array([], np.int32)).shape == (0, weight.in_features)


def test_conversion_in_row_groups_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("Q4_K", rows=11)
    whole = formats.dequantize(weight)
    packed = formats.quantize(whole, "Q8_0").data
    monkeypatch.setattr(formats, "GROUP_VALUES", 2 * weight.in_features)
    assert np.array_equal(formats.dequantize(weight), whole)
    assert np.array_equal(formats.quantize(whole, "Q8_0").data, packed)


@pytest.mark.parametrize("format", formats.QUANTIZABLE)
def test_quantisation_equals_gguf(format: str) -> None:
    values = np.random.default_rng(1).standard_normal((19, 128), np.float32)
    values[3] = 0
    values[4, :32] = 0.25
    weight = formats.quantize(values, format, "model.layers.0.mlp.up_proj")
    assert weight.name == "model.layers.0.mlp.up_proj"
    assert (weight.format, weight.out_features, weight.in_features) == (format, 19, 128)
    expected = quants.quantize(values, GGMLQuantizationType[format])
    assert np.array_equal(weight.data, expected)


def test_quantisation_error_is_within_half_a_step() -> None:
    values = np.random.default_rng(2).standard_normal((16, 256), np.float32)
    for format, levels in (("Q8_0", 127), ("Q4_1", 15)):
        error = np.abs(formats.dequantize(formats.quantize(values, format)) - values).max()
        span = np.abs(values).max() if format == "Q8_0" else values.max() - values.min()
        assert error <= 0.52 * span / levels


def test_rows_that_do_not_divide_into_blocks_become_bfloat16() -> None:
    weight = formats.quantize(np.ones((4, 40), np.float32), "Q4_0")
    assert weight.format == "BF16"
    assert weight.data.dtype == formats.DTYPES["BF16"]
    assert weight.data.shape == (4, 40)


def test_plain_formats_convert_exactly() -> None:
    for dtype in formats.DTYPES.values():
        matrix = np.random.default_rng(0).standard_normal((3, 5)).astype(dtype)
        weight, values = formats.plain_weight(matrix, "x"), matrix.astype(np.float32)
        assert np.array_equal(formats.dequantize(weight), values)
        assert np.array_equal(formats.dequantize_rows(weight, [2, 0]), values[[2, 0]])


def test_unsupported_formats_and_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot quantise to Q4_K"):
        formats.quantize(np.ones((2, 256), np.float32), "Q4_K")
    with pytest.raises(ValueError, match="does not divide"):
        formats.row_bytes("Q6_K", 128)
    with pytest.raises(ValueError, match="no weight format"):
        formats.plain_weight(np.zeros(3, np.int64))
