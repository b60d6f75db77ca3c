"""Converts integer weights with a scale and a zero point per group of inputs (GPTQ, AWQ) to the
engine's weight formats.

weight[o, i] = scale[g, o] * (code[o, i] - zero[g, o]), where g is the group of input i. If the size
of every group is a multiple of 32, the result has a block format:

- 2, 3 bits, or 4 bits with every zero 8: Q4_0, exact (4.5 bits per weight);
- 4 bits, other zeros: Q4_1, whose offset -scale * zero is rounded to float16, by less than 0.8% of
  a step (5 bits per weight);
- 8 bits, every zero 128: Q8_0, exact (8.5 bits per weight).

The inputs of a group need not be neighbours (act-order): they are sorted by group, and
`Weight.order` says which input each stored column is.

Anything else (8 bits with other zeros, odd sizes) becomes float16, each weight rounded by at most 1
part in 2048.
"""

from __future__ import annotations

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight

#: Inputs per block.
BLOCK = 32


def grouped_weight(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    groups: np.ndarray,
    bits: int,
    name: str,
) -> Weight:
    """Build a `Weight` from quantised parts.

    Args:
        codes: uint8 `[out, in]`.
        scales: `[groups, out]`.
        zeros: Integer zero points, `[groups, out]`.
        groups: The group of each input, int64 `[in]`.
        bits: Bits per code: 2, 3, 4 or 8.
        name: The name of the result.
    """
    group_of_block, order = block_groups(groups)
    if bits < 4:  # the codes and zeros of 4 bits with the same differences
        codes = (codes + 8 - zeros[groups].T).astype(np.uint8)
        zeros, bits = np.full_like(zeros, 8), 4
    is_symmetric = bool((zeros == 1 << (bits - 1)).all())
    is_exact = bool((scales == scales.astype(np.float16)).all())
    if group_of_block is None or not is_exact or (bits == 8 and not is_symmetric):
        scale = scales.astype(np.float32)[groups].T
        offset = zeros.astype(np.float32)[groups].T
        values = scale * (codes.astype(np.float32) - offset)
        return plain_weight(values.astype(np.float16), name)
    # [out, blocks, 1]: each block's scale and zero are those of its group.
    scale = np.ascontiguousarray(scales.astype(np.float16)[group_of_block].T[..., None])
    zero = zeros[group_of_block].T[..., None]
    codes = codes if order is None else codes[:, order]
    blocks = codes.reshape(codes.shape[0], -1, BLOCK)
    if bits == 8:
        return block_weight("Q8_0", name, blocks ^ 128, scale, order=order)
    packed = blocks[..., :16] | (blocks[..., 16:] << 4)
    if is_symmetric:
        return block_weight("Q4_0", name, packed, scale, order=order)
    low = (-scale.astype(np.float32) * zero).astype(np.float16)
    return block_weight("Q4_1", name, packed, scale, low, order=order)


def check_parts(module: str, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> None:
    """Check that the parts of a module are of one shape and that there is at least one group.

    Args:
        module: The name of the module, for errors.
        codes: `[out, in]`.
        scales: `[groups, out]`.
        zeros: `[groups, out]`.
    """
    is_consistent = codes.ndim == scales.ndim == 2 and scales.shape == zeros.shape
    if not is_consistent or scales.shape[1] != len(codes) or not codes.size or not scales.size:
        raise CheckpointError(
            f"the quantised parts of {module!r} do not fit together: {codes.shape} codes,"
            f" {scales.shape} scales and {zeros.shape} zero points"
        )
    if scales.dtype not in DTYPES.values():
        raise CheckpointError(f"the scales of {module!r} are {scales.dtype}, no float")


def unpack(words: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """Unpack fields of 2, 3, 4 or 8 bits from int32 words, lowest first and without gaps, along
    `dim`, as uint8. Three words hold 32 fields of 3 bits, some of which lie in two words."""
    if words.dtype.itemsize != 4 or words.dtype.kind not in "iu" or words.ndim != 2:
        raise CheckpointError(
            f"quantised parts are {words.dtype} of shape {words.shape}, not a matrix of int32"
        )
    if bits == 3:
        return _three_bits(words if dim == 1 else words.T, dim)
    count = 32 // bits
    fields = [(words >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]
    spread = np.stack([field.astype(np.uint8) for field in fields], axis=dim + 1)
    shape = list(words.shape)
    shape[dim] *= count
    return spread.reshape(shape)


def _three_bits(words: np.ndarray, dim: int) -> np.ndarray:
    """Fields of three bits along the second axis of `words`; the result is transposed for dim 0."""
    if words.shape[1] % 3:
        raise CheckpointError(f"fields of 3 bits are {words.shape[1]} words, no multiple of 3")
    stream = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
    spread = np.unpackbits(stream, axis=1, bitorder="little").reshape(len(words), -1, 3)
    fields = spread[..., 0] | spread[..., 1] << 1 | spread[..., 2] << 2
    return fields if dim == 1 else fields.T


def block_groups(groups: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The group of each block of 32 inputs, and the order in which the inputs are stored, int32;
    None for the order if it is that of the inputs, and for both if the sizes of the groups are no
    multiples of 32."""
    if len(groups) % BLOCK:
        return None, None
    order = None
    blocks = groups.reshape(-1, BLOCK)
    if not bool((blocks == blocks[:, :1]).all()):
        order = np.argsort(groups, kind="stable").astype(np.int32)
        blocks = groups[order].reshape(-1, BLOCK)
        if not bool((blocks == blocks[:, :1]).all()):
            return None, None
    return blocks[:, 0], order


def block_weight(
    format: str,
    name: str,
    codes: np.ndarray,
    *heads: np.ndarray,
    order: np.ndarray | None = None,
) -> Weight:
    """A weight of a block format.

    Args:
        format: The format.
        name: The name of the result.
        codes: The bytes of each block's codes, uint8 `[out, blocks, bytes]`.
        heads: What is stored before them, `[out, blocks, numbers]` each.
        order: The order of the inputs, see `Weight`.
    """
    parts = [np.ascontiguousarray(part).view(np.uint8) for part in heads]
    data = np.concatenate((*parts, codes), -1).reshape(len(codes), -1)
    return Weight(format, data.shape[0], codes.shape[1] * BLOCK, data, name, order=order)
