"""Reads weights in FP8 (E4M3) with a float32 scale per block of rows and columns (DeepSeek-V3,
arXiv:2412.19437).

The products of numbers and scales are rounded to bfloat16, by less than 1 part in 256. Activations
are not rounded to FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer

#: The tensor that only packed modules have.
MARKER = "weight_scale_inv"
#: The tensors of one packed module, except its bias.
PARTS = ("weight", "weight_scale_inv")


def check(settings: Mapping[str, Any], path: object) -> None:
    """Raise `CheckpointError` for unsupported settings."""
    block = settings.get("weight_block_size")
    if settings.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(
            f"{path}: FP8 of format {settings.get('fmt', 'e4m3')!r} with weight_block_size"
            f" {block!r} is not supported; supported is 'e4m3' with two sizes"
        )
    for size in block:
        integer("weight_block_size", size)


def read(
    get: Callable[[str], np.ndarray], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    """Read a module's weight. `get` reads a tensor of the checkpoint by name."""
    rows, columns = settings["weight_block_size"]
    codes, scales = get(f"{module}.weight"), get(f"{module}.{MARKER}")
    is_valid = codes.ndim == 2 and codes.size and codes.dtype.name == "float8_e4m3fn"
    blocks = tuple(
        -(-size // step) for size, step in zip(codes.shape, (rows, columns), strict=False)
    )
    if not is_valid or scales.dtype != np.float32 or scales.shape != blocks:
        raise CheckpointError(
            f"the parts of {module!r} do not fit together: {codes.dtype} of shape {codes.shape} and"
            f" {scales.dtype} scales of shape {scales.shape}, in blocks of {rows} by {columns}"
        )
    values = np.empty(codes.shape, DTYPES["BF16"])
    for index, row in enumerate(scales):
        part = slice(index * rows, (index + 1) * rows)
        factors = np.repeat(row, columns)[: codes.shape[1]]
        values[part] = codes[part].astype(np.float32) * factors
    return plain_weight(values, module)
