"""PTQ161: a matrix whose salient input columns have four bits and whose other columns have one
(Zhao et al., "PTQ1.61: Push the Real Limit of Extremely Low-Bit Post-Training Quantization Methods
for Large Language Models", arXiv:2502.13179).

A fifth of the inputs, rounded to nearest, is salient. With s(o, i) = 1 or -1 and a code q(o, i)
from 0 to 15, weight[o, i] is

- (spread[o] * s(o, i) + mean[o]) * columns[i] for inputs with signs,
- step[o] * (2 * q(o, i) - 15) + middle[o] for salient ones.

A row is stored as spread, mean, step and middle in float16, the signs as bits, lowest first (1 is
positive), and the codes as nibbles, the first of two in the low half. `Weight.columns` is bfloat16
`[in_features]` and 0 for salient inputs. That is 0.8 + 0.2 * 4 = 1.6 bits per weight, 64 bits per
row and 16 bits per column.
"""

from __future__ import annotations

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight

FORMAT = "PTQ161"
_HEADER = 8  # bytes of a row's four numbers
_MAX_INPUTS = 1 << 16  # the kernels have 16 bits for the number of an input


def num_salient(in_features: int) -> int:
    """How many inputs have four bits."""
    return (in_features + 2) // 5


def row_bytes(in_features: int) -> int:
    """Bytes of one row."""
    salient = num_salient(in_features)
    return _HEADER + -(-(in_features - salient) // 8) + -(-salient // 2)


def pack(
    numbers: np.ndarray, signs: np.ndarray, codes: np.ndarray, columns: np.ndarray, name: str = ""
) -> Weight:
    """Build a weight.

    Args:
        numbers: spread, mean, step and middle, float16 `[out, 4]`.
        signs: Whether weights are positive, bool `[out, inputs with signs]`.
        codes: uint8 `[out, salient inputs]`.
        columns: bfloat16 `[in]`.
        name: The name of the result.
    """
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    parts = (
        np.ascontiguousarray(numbers, np.float16).view(np.uint8),
        np.packbits(signs, axis=1, bitorder="little"),
        padded[:, ::2] | padded[:, 1::2] << 4,
    )
    data = np.concatenate(parts, 1)
    return Weight(FORMAT, len(data), len(columns), data, name, columns=columns)


def check(weight: Weight) -> None:
    """Check the data and the columns of a weight, which the kernels read as raw memory.

    Raises:
        CheckpointError: They are not those of the format.
    """
    data, columns, width = weight.data, weight.columns, weight.in_features
    is_valid = data.dtype == np.uint8 and data.shape == (weight.out_features, row_bytes(width))
    if columns is None or columns.dtype.name != "bfloat16" or columns.shape != (width,):
        is_valid = False
    elif width > _MAX_INPUTS or np.count_nonzero(columns == 0) != num_salient(width):
        is_valid = False
    if not is_valid or not data.size:
        raise CheckpointError(
            f"{weight.name or 'a weight'} holds {data.dtype} of shape {data.shape}, not a {FORMAT}"
            f" matrix of {weight.out_features} by {width} with {num_salient(width)} salient inputs"
        )


def column_table(columns: np.ndarray) -> np.ndarray:
    """What the kernels read, uint16: the inputs in their order of storage, those with signs first,
    and then the scales of these as stored."""
    has_sign = columns != 0
    order = np.concatenate((np.flatnonzero(has_sign), np.flatnonzero(~has_sign)))
    return np.concatenate((order.astype(np.uint16), columns[has_sign].view(np.uint16)))


def dequantize(weight: Weight, data: np.ndarray) -> np.ndarray:
    """Rows of a weight as float32 `[rows, in_features]`."""
    columns = weight.columns
    assert columns is not None
    has_sign = columns != 0
    count = int(has_sign.sum())
    end = _HEADER + -(-count // 8)
    numbers = np.ascontiguousarray(data[:, :_HEADER]).view(np.float16).astype(np.float32)
    spread, mean, step, middle = (numbers[:, i : i + 1] for i in range(4))
    bits = np.unpackbits(data[:, _HEADER:end], axis=1, count=count, bitorder="little")
    nibbles = np.stack((data[:, end:] & 15, data[:, end:] >> 4), -1).reshape(len(data), -1)
    codes = nibbles[:, : len(columns) - count].astype(np.float32)
    out = np.empty((len(data), len(columns)), np.float32)
    signed = np.where(bits == 1, spread, -spread)
    out[:, has_sign] = (signed + mean) * columns[has_sign].astype(np.float32)
    out[:, ~has_sign] = step * (2 * codes - 15) + middle
    return out if weight.scale == 1 else out * np.float32(weight.scale)
