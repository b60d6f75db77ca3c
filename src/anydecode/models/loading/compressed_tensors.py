"""Reads the formats of compressed-tensors, which llm-compressor and others write.

Which format a module has, its tensors say: integers of 1 to 8 bits packed into int32
(`weight_packed` and `weight_shape`), int8 or FP8 numbers (`weight`), or 4-bit floats
(`weight_packed` of bytes; NVFP4 with a `weight_global_scale`, MXFP4 without). Scales are per
tensor, output, group of inputs or block of outputs and inputs; those of MXFP8 and MXFP4 are
exponents. What is stored for activations and the cache is not used: products round activations to
int8 in blocks of 32, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer
from anydecode.models.loading import nvfp4
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, mxfp4_weight, runs, scaled_weight

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale",
    "output_scale", "output_zero_point",
)  # fmt: skip

Get = Callable[[str], np.ndarray]
Has = Callable[[str], bool]


def layouts(settings: Mapping[str, Any], path: object) -> list[Layout]:
    """The only layout, whose formats are told apart by their tensors.

    Raises:
        CheckpointError: The settings name a format that is not supported.
    """
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(x, dict) for x in groups.values()):
        raise CheckpointError(
            f"{path}: config_groups is {groups!r}; allowed is an object of objects"
        )
    sparsity = settings.get("sparsity_config") or {}
    named = [settings.get("format"), *(group.get("format") for group in groups.values())]
    for format in (*named, sparsity.get("format")):
        if format is not None and format not in FORMATS:
            raise CheckpointError(
                f"{path}: compressed-tensors with format {format!r} is not supported; supported are"
                f" {', '.join(FORMATS)}"
            )
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(
            f"{path}: compressed-tensors with a transform_config is not supported; supported are"
            " weights that need no transforms at run time"
        )
    return [Layout("weight_scale", _PARTS, partial(_read, block=_block(groups, path)))]


def _block(groups: dict[str, Any], path: object) -> tuple[int, int] | None:
    """The outputs and inputs that share a scale, where scales are per block."""
    found = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    sizes = {_sizes(block) for block in found if block}
    if not sizes:
        return None
    if len(sizes) > 1 or len(next(iter(sizes))) != 2:
        raise CheckpointError(
            f"{path}: the block_structure is {found}; supported is one of two sizes"
        )
    rows, columns = (integer("block_structure", size) for size in sizes.pop())
    return rows, columns


def _sizes(block: Any) -> tuple[Any, ...]:
    """The sizes of a block, which earlier versions of the format wrote as "128x128"."""
    if isinstance(block, str):
        return tuple(int(size) if size.isdecimal() else size for size in block.split("x"))
    return tuple(block) if isinstance(block, list) else (block,)


def _read(
    get: Get, has: Has, module: str, settings: Any, block: tuple[int, int] | None = None
) -> Weight:
    if has(f"{module}.weight_global_scale"):
        return nvfp4.read(get, module, "weight_packed", "weight_global_scale", is_divisor=True)
    scales = get(f"{module}.weight_scale")
    if has(f"{module}.weight_shape"):
        numbers = _unpacked(get, module)
    elif has(f"{module}.weight_packed"):
        return mxfp4_weight(module, get(f"{module}.weight_packed"), scales)
    else:
        numbers = get(f"{module}.weight")
    if numbers.ndim != 2 or numbers.dtype.name not in ("int8", "float8_e4m3fn"):
        raise misfit(module, numbers)
    if scales.dtype == np.uint8:
        return _mxfp8(module, numbers, scales)
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if block is not None and scales.size > 1:
        if scales.shape == tuple(
            -(-n // size) for n, size in zip(numbers.shape, block, strict=True)
        ):
            return scaled_blocks(numbers, scales, block, module)
    if scales.ndim != 2:
        raise misfit(module, numbers, scales)
    groups = _groups(get, has, module, numbers.shape[1], scales.shape[1])
    if has(f"{module}.weight_zero_point"):
        zeros = _zeros(get, module, numbers, scales)
        numbers = numbers.astype(np.int16) - zeros.astype(np.int16)[:, groups]
    return scaled_weight(numbers, scales, groups, module)


def scaled_blocks(
    numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int], module: str
) -> Weight:
    """A weight from numbers with a scale per block of outputs and inputs."""
    outputs = np.repeat(scales, block[0], 0)[: len(numbers)]
    return scaled_weight(numbers, outputs, np.arange(numbers.shape[1]) // block[1], module)


def _groups(get: Get, has: Has, module: str, num_inputs: int, num_groups: int) -> np.ndarray:
    """The group of each input: stored, or runs of equal length."""
    if not has(f"{module}.weight_g_idx"):
        return runs(num_inputs, num_groups, module)
    groups = get(f"{module}.weight_g_idx")
    if groups.dtype.kind == "i" and (groups == -1).any():  # declared, but not used
        return runs(num_inputs, num_groups, module)
    is_valid = groups.dtype.kind == "i" and groups.shape == (num_inputs,)
    if not is_valid or groups.min() < 0 or groups.max() >= num_groups:
        raise CheckpointError(
            f"the weight_g_idx of {module!r} is not a group, of {num_groups}, for each of"
            f" {num_inputs} inputs"
        )
    return groups.astype(np.int64)


def _zeros(get: Get, module: str, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The zero points, int8 `[out, groups]`; those of packed numbers are packed along outputs."""
    zeros = get(f"{module}.weight_zero_point")
    if zeros.dtype == np.int32 and zeros.ndim == 2:
        bits = _bits(get(f"{module}.weight_packed"), numbers.shape[1], module)
        zeros = _fields(np.ascontiguousarray(zeros.T), bits, len(numbers), module).T
    zeros = zeros.reshape(-1, 1) if zeros.ndim < 2 else zeros
    if zeros.dtype.kind == "f" or zeros.dtype.kind == "V":
        if zeros.astype(np.float32).any():  # FP8 is symmetric
            raise misfit(module, numbers, zeros)
        return np.zeros(scales.shape, np.int8)
    if zeros.dtype != np.int8 or zeros.shape != scales.shape or len(zeros) not in (1, len(numbers)):
        raise misfit(module, numbers, scales, zeros)
    return zeros


def _unpacked(get: Get, module: str) -> np.ndarray:
    """Integers of any number of bits, int8 `[out, in]`."""
    packed, shape = get(f"{module}.weight_packed"), get(f"{module}.weight_shape")
    if packed.ndim != 2 or packed.dtype != np.int32 or shape.shape != (2,):
        raise misfit(module, packed, shape)
    rows, columns = (integer(f"the weight_shape of {module!r}", int(size)) for size in shape)
    if rows != len(packed):
        raise misfit(module, packed, shape)
    return _fields(packed, _bits(packed, columns, module), columns, module)


def _bits(packed: np.ndarray, count: int, module: str) -> int:
    """The bits per number, by the number of words of a row."""
    for bits in range(1, 9):
        if packed.shape[1] == -(-count * bits // 32):
            return bits
    raise CheckpointError(
        f"{count} numbers of {module!r} are packed into {packed.shape[1]} words; allowed are 1 to 8"
        " bits per number"
    )


def _fields(words: np.ndarray, bits: int, count: int, module: str) -> np.ndarray:
    """Fields of `bits` bits without gaps, lowest first, as int8: their middle is zero."""
    if words.shape[1] != -(-count * bits // 32):
        raise misfit(module, words)
    stream = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8), axis=1, count=count * bits, bitorder="little"
    )
    fields = np.packbits(stream.reshape(len(words), count, bits), axis=-1, bitorder="little")
    return (fields[..., 0].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def _mxfp8(module: str, numbers: np.ndarray, scales: np.ndarray) -> Weight:
    """FP8 with an exponent for every 32 numbers, uint8 `[out, in / 32]`; exact in bfloat16."""
    if scales.ndim != 2 or scales.shape[1] * 32 != numbers.shape[1] or (scales == 255).any():
        raise misfit(module, numbers, scales)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    groups = runs(numbers.shape[1], scales.shape[1], module)
    return scaled_weight(numbers, factors, groups, module, DTYPES["BF16"])
