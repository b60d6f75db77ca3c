"""Reads the weights of bitsandbytes: 4-bit codes of a table of 16 numbers (NF4, FP4) with a scale
per run of numbers (Dettmers et al., 2023, arXiv:2305.14314), and int8 with a scale per output
(Dettmers et al., 2022, arXiv:2208.07339).

4-bit weights become plain numbers in the type from which they were quantised, which is named in the
file: the same bits to which bitsandbytes dequantises them. No kernel has these tables. int8 becomes
Q8_0, without loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer, number
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, scaled_weight

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
_CHUNK = 1 << 14  # runs that are converted at a time

Get = Callable[[str], np.ndarray]
Has = Callable[[str], bool]


def layouts(settings: Any, path: object) -> list[Layout]:
    """How 4-bit and 8-bit modules are stored; which ones are of which kind, their tensors say."""
    nested = ("weight.nested_absmax", "weight.nested_quant_map")
    states = (f"{_STATE}nf4", f"{_STATE}fp4")
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
    state = _state(get, has, module)
    shape, size = (
        _shape(module, state),
        integer(f"the blocksize of {module!r}", state.get("blocksize")),
    )
    dtype = _TYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise CheckpointError(
            f"{module!r} was quantised from {state.get('dtype')!r}; supported are"
            f" {', '.join(_TYPES)}"
        )
    packed = np.ascontiguousarray(get(f"{module}.weight")).reshape(-1).view(np.uint8)
    scales, table = _scales(get, module, state), get(f"{module}.weight.quant_map")
    count = math.prod(shape)
    is_valid = table.shape == (16,) and table.dtype == np.float32
    if not is_valid or packed.size * 2 < count or scales.shape != (-(-count // size),) or size % 2:
        raise misfit(module, packed, scales, table)
    values = np.empty(count, dtype)
    for start in range(0, len(scales), _CHUNK):
        first, last = start * size, min(count, (start + _CHUNK) * size)
        part = packed[first // 2 : -(-last // 2)]
        numbers = table[np.stack((part >> 4, part & 15), -1).reshape(-1)[: last - first]]
        factors = np.repeat(scales[start : start + _CHUNK], size)[: last - first]
        values[first:last] = numbers * factors
    return plain_weight(values.reshape(shape), module)


def _state(get: Get, has: Has, module: str) -> dict[str, Any]:
    """The JSON object that is stored with a module as a tensor of bytes."""
    names = [name for name in (f"{_STATE}nf4", f"{_STATE}fp4") if has(f"{module}.{name}")]
    if not names:
        raise CheckpointError(
            f"the 4-bit weight of {module!r} has no state; supported are nf4 and fp4"
        )
    stored = get(f"{module}.{names[0]}")
    try:
        state = json.loads(stored.astype(np.uint8).tobytes())
    except ValueError as error:
        raise CheckpointError(f"the state of {module!r} is not valid JSON: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"the state of {module!r} is no JSON object")
    return state


def _shape(module: str, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise CheckpointError(f"the shape of {module!r} is {shape!r}; allowed are two sizes")
    rows, columns = (integer(f"a size of {module!r}", size) for size in shape)
    return rows, columns


def _scales(get: Get, module: str, state: dict[str, Any]) -> np.ndarray:
    """The scale of each run, which may be codes of a table of 256 with a scale per run in turn."""
    scales = get(f"{module}.weight.absmax")
    if "nested_blocksize" not in state:
        if scales.dtype != np.float32:
            raise misfit(module, scales)
        return scales
    size = integer(f"the nested_blocksize of {module!r}", state["nested_blocksize"])
    offset = number(f"the nested_offset of {module!r}", state.get("nested_offset"), -1e9)
    table, factors = (get(f"{module}.weight.nested_{part}") for part in ("quant_map", "absmax"))
    is_valid = scales.dtype == np.uint8 and table.dtype == factors.dtype == np.float32
    if not is_valid or table.shape != (256,) or factors.shape != (-(-scales.size // size),):
        raise misfit(module, scales, table, factors)
    result: np.ndarray = table[scales] * np.repeat(factors, size)[: scales.size]
    return result + np.float32(offset)
