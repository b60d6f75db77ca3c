"""Weights of the codes 0, 1 and 2 for -1, 0 and 1 and one factor, as BitNet b1.58 has them (Ma et
al., 2024, arXiv:2402.17764)."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import BLOCKS, plain_weight
from anydecode.kernels.interface import Weight

_FORMAT = "TQ2_0"
#: Inputs per block.
BLOCK = BLOCKS[_FORMAT][0]


def ternary_weight(codes: np.ndarray, factor: float, name: str) -> Weight:
    """The matrix of codes uint8 `[out, in]`: in blocks of TQ2_0, or plain where these do not divide
    the number of inputs."""
    rows, columns = codes.shape
    if columns % BLOCK:
        values = (codes.astype(np.int8) - 1).astype(np.float32)
        return plain_weight(values * np.float32(factor), name)
    four = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return packed_ternary(np.bitwise_or.reduce(four, axis=2).reshape(rows, -1), factor, name)


def packed_ternary(codes: np.ndarray, factor: float, name: str) -> Weight:
    """The matrix of the bytes uint8 `[out, in / 4]` of blocks of TQ2_0 without their scales."""
    blocks = codes.reshape(-1, BLOCK // 4)
    ones = np.broadcast_to(np.ones(1, np.float16).view(np.uint8), (len(blocks), 2))
    data = np.concatenate([blocks, ones], 1).reshape(len(codes), -1)
    return Weight(_FORMAT, len(codes), 4 * codes.shape[1], data, name, scale=factor)
