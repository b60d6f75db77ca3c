"""Reads the weights of bitsandbytes: 4-bit codes of a table of 16 numbers (NF4, FP4) with a scale
per run of numbers (Dettmers et al., 2023, arXiv:2305.14314), and int8 with a scale per output
(Dettmers et al., 2022, arXiv:2208.07339).

4-bit weights become NF4 or FP4, without loss, with a scale in float32 for every 64 inputs. Where
the scales themselves are quantised (double quantisation), they are dequantised. Runs go on from row
to row. Matrices whose rows are no multiple of 64, so that a block would have parts of two runs, and
those with runs of 32 become plain numbers in the type from which they were quantised, which is
named in the file: the same bits to which bitsandbytes dequantises them. int8 becomes Q8_0, without
loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import (
    BITSANDBYTES_VALUES,
    BLOCKS,
    DTYPES,
    halves_paired,
    plain_weight,
)
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer, number
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, scaled_weight

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
_NESTED = ("nested_quant_map", "nested_absmax")
_RUNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # sizes of runs that bitsandbytes writes
_CHUNK = 1 << 14  # runs that are converted at a time

Get = Callable[[str], np.ndarray]
Has = Callable[[str], bool]


def layouts(settings: Any, path: object) -> list[Layout]:
    """How 4-bit and 8-bit modules are stored; which ones are of which kind, their tensors say."""
    nested = (f"weight.{name}" for name in _NESTED)
    states = (f"{_STATE}{format.lower()}" for format in BITSANDBYTES_VALUES)
    four = ("weight", "weight.absmax", "weight.quant_map", *nested, *states)
    return [
        Layout("weight.absmax", four, _read_four_bits),
        Layout("SCB", ("weight", "SCB", "weight_format"), _read_int8),
    ]


def _read_int8(get: Get, has: Has, module: str, settings: Any) -> Weight:
    """The scales are the largest absolute values of the outputs, over 127. The values were float16,
    so that Q8_0 holds them, and 1/127 is the factor of all."""
    numbers, largest = get(f"{module}.weight"), get(f"{module}.SCB")
    stored = int(get(f"{module}.weight_format")) if has(f"{module}.weight_format") else 0
    if stored:
        raise CheckpointError(f"the weight_format of {module!r} is {stored}; supported is 0")
    if numbers.dtype != np.int8 or largest.dtype != np.float32:
        raise misfit(module, numbers, largest)
    groups = np.zeros(numbers.shape[-1], np.int64)
    weight = scaled_weight(numbers, largest.reshape(-1, 1), groups, module)
    weight.scale /= 127
    return weight


def _read_four_bits(get: Get, has: Has, module: str, settings: Any) -> Weight:
    format, state = _state(get, has, module)
    shape, size = _shape(module, state), state.get("blocksize")
    if not isinstance(size, int) or size not in _RUNS:
        raise CheckpointError(
            f"the blocksize of {module!r} is {size!r}; allowed are {', '.join(map(str, _RUNS))}"
        )
    dtype = _TYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise CheckpointError(
            f"{module!r} was quantised from {state.get('dtype')!r}; supported are"
            f" {', '.join(_TYPES)}"
        )
    table = get(f"{module}.weight.quant_map")
    expected = BITSANDBYTES_VALUES[format]
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=0, atol=1e-6):
        raise CheckpointError(f"the quant_map of {module!r} is not the table of {format}")
    packed = np.ascontiguousarray(get(f"{module}.weight")).reshape(-1).view(np.uint8)
    scales = _scales(get, has, module, state)
    count = math.prod(shape)
    if packed.size < -(-count // 2) or scales.shape != (-(-count // size),):
        raise misfit(module, packed, scales)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"a scale of {module!r} is not finite")
    block, num_bytes = BLOCKS[format]
    if shape[1] % block or size % block:
        return plain_weight(_numbers(format, packed, scales, size, shape, dtype), module)
    blocks = np.empty((count // block, num_bytes), np.uint8)
    each = np.repeat(scales, size // block)[: len(blocks)]
    blocks[:, :4] = each[:, None].view(np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        stop = min(len(blocks), start + _CHUNK)
        codes = packed[start * block // 2 : stop * block // 2].reshape(-1, 2, block // 4)
        # The first of two numbers is in the high half of a byte.
        paired = halves_paired(codes >> 4 | codes << 4)
        blocks[start:stop, 4:] = paired.reshape(-1, block // 2)
    return Weight(format, *shape, blocks.reshape(shape[0], -1), module)


def _numbers(
    format: str,
    packed: np.ndarray,
    scales: np.ndarray,
    size: int,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
) -> np.ndarray:
    """A dequantised matrix, from runs of `size` numbers."""
    count, table = math.prod(shape), BITSANDBYTES_VALUES[format]
    values = np.empty(count, dtype)
    for start in range(0, len(scales), _CHUNK):
        first, last = start * size, min(count, (start + _CHUNK) * size)
        part = packed[first // 2 : -(-last // 2)]
        numbers = table[np.stack((part >> 4, part & 15), -1).reshape(-1)[: last - first]]
        factors = np.repeat(scales[start : start + _CHUNK], size)[: last - first]
        values[first:last] = numbers * factors
    return values.reshape(shape)


def _state(get: Get, has: Has, module: str) -> tuple[str, dict[str, Any]]:
    """The format of a module, and the JSON object that is stored with it as a tensor of bytes."""
    formats = [name for name in BITSANDBYTES_VALUES if has(f"{module}.{_STATE}{name.lower()}")]
    if not formats:
        raise CheckpointError(
            f"the 4-bit weight of {module!r} has no state; supported are nf4 and fp4"
        )
    stored = get(f"{module}.{_STATE}{formats[0].lower()}")
    try:
        state = json.loads(stored.astype(np.uint8).tobytes())
    except ValueError as error:
        raise CheckpointError(f"the state of {module!r} is not valid JSON: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"the state of {module!r} is no JSON object")
    return formats[0], state


def _shape(module: str, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise CheckpointError(f"the shape of {module!r} is {shape!r}; allowed are two sizes")
    rows, columns = (integer(f"a size of {module!r}", size) for size in shape)
    return rows, columns


def _scales(get: Get, has: Has, module: str, state: dict[str, Any]) -> np.ndarray:
    """The scale of each run, which may be codes of a table of 256 with a scale per run in turn."""
    scales = get(f"{module}.weight.absmax")
    if scales.dtype == np.float32:
        return scales
    missing = [name for name in _NESTED if not has(f"{module}.weight.{name}")]
    missing += [name for name in ("nested_blocksize", "nested_offset") if name not in state]
    if missing:
        raise CheckpointError(
            f"the scales of {module!r} are {scales.dtype}, without {', '.join(missing)}; allowed"
            " are float32, or quantised scales with these"
        )
    size = integer(f"the nested_blocksize of {module!r}", state["nested_blocksize"])
    offset = number(f"the nested_offset of {module!r}", state.get("nested_offset"), -1e9)
    table, factors = (get(f"{module}.weight.{name}") for name in _NESTED)
    is_valid = scales.dtype == np.uint8 and table.dtype == factors.dtype == np.float32
    if not is_valid or table.shape != (256,) or factors.shape != (-(-scales.size // size),):
        raise misfit(module, scales, table, factors)
    result: np.ndarray = table[scales] * np.repeat(factors, size)[: scales.size]
    return result + np.float32(offset)
