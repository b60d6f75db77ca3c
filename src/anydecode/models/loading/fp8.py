"""Reads weights in FP8 (E4M3): with a scale per block of outputs and inputs (DeepSeek-V3,
arXiv:2412.19437), per tensor (Mistral, AutoFP8) or per output (fbgemm).

Tools call the factor of the numbers `weight_scale` or `weight_scale_inv`. The products of numbers
and scales are rounded to bfloat16, by less than 1 part in 256; a single scale is kept as the factor
of bfloat16 numbers, without loss. Activations are not rounded to FP8, so that their scales and
those of the cache are not used. Modules of bytes, the experts of DeepSeek-V4, are in MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import float8_e8m0fnu

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, mxfp4_weight, scaled_weight

#: The names of the factor, each of which only packed modules have.
SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATIONS = ("activation_scale", "input_scale", "input_scale_ub")
_FORMATS = ("e4m3", "float8_e4m3fn")
_SCALE_TYPES = (*DTYPES.values(), np.dtype(float8_e8m0fnu))


def layouts(settings: Mapping[str, Any], path: object) -> list[Layout]:
    """A layout for each name of the factor.

    Raises:
        CheckpointError: The settings name a type or blocks that are not supported.
    """
    block, kind = settings.get("weight_block_size"), settings.get("fmt", _FORMATS[0])
    is_valid = block is None or (isinstance(block, list) and len(block) == 2)
    if kind not in _FORMATS or not is_valid:
        raise CheckpointError(
            f"{path}: FP8 of format {kind!r} with weight_block_size {block!r} is not supported;"
            f" supported are {' and '.join(_FORMATS)}, with two sizes or null"
        )
    for size in block or ():
        integer("weight_block_size", size)
    return [
        Layout(name, ("weight", name, *_ACTIVATIONS), partial(read, scale=name)) for name in SCALES
    ]


def read(
    get: Callable[[str], np.ndarray],
    has: Callable[[str], bool],
    module: str,
    settings: Any,
    scale: str = SCALES[0],
) -> Weight:
    """Read a module's weight. `get` reads a tensor of the checkpoint by name; `scale` is the name
    of the factor."""
    codes, scales = get(f"{module}.weight"), get(f"{module}.{scale}")
    if codes.dtype in (np.uint8, np.int8) and scales.dtype == np.dtype(float8_e8m0fnu):
        return mxfp4_weight(module, codes.view(np.uint8), scales.view(np.uint8))
    is_valid = codes.ndim == 2 and codes.size and codes.dtype.name == "float8_e4m3fn"
    if not is_valid or scales.dtype not in _SCALE_TYPES:
        raise misfit(module, codes, scales)
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"a scale of {module!r} is not finite")
    block = settings.get("weight_block_size")
    if block is not None and scales.size > 1:
        shards = settings.get("qkv_shards", 1) if module.endswith(".qkv_proj") else 1
        return _in_blocks(codes, scales, tuple(block), module, shards)
    if scales.size not in (1, len(codes)):
        raise misfit(module, codes, scales)
    groups = np.zeros(codes.shape[1], np.int64)
    return scaled_weight(codes, scales.reshape(-1, 1), groups, module, DTYPES["BF16"])


def _in_blocks(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], module: str, shards: int
) -> Weight:
    """A weight with a scale per block of outputs and inputs; blocks of outputs begin anew in each
    of its `shards` equal parts."""
    rows, columns = block
    length = len(codes) // shards
    per_shard, blocks = -(-length // rows), -(-codes.shape[1] // columns)
    if len(codes) % shards or scales.shape != (shards * per_shard, blocks):
        raise CheckpointError(f"{misfit(module, codes, scales)}, in blocks of {rows} by {columns}")
    values = np.empty(codes.shape, DTYPES["BF16"])
    for index, row in enumerate(scales):
        start, at = index // per_shard * length, index % per_shard * rows
        part = slice(start + at, start + min(at + rows, length))
        factors = np.repeat(row, columns)[: codes.shape[1]]
        values[part] = codes[part].astype(np.float32) * factors
    return plain_weight(values, module)
