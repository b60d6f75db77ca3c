"""Where the blocks of the weight formats hold their scales, for tests with random blocks."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import BITSANDBYTES_VALUES, BLOCKS

#: Where the blocks of a format have float16 scales, if not at byte 0 alone.
_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
}


def set_scales(format: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Replace the scales of blocks uint8 `[..., bytes]`: float16, or in NF4 and FP4 float32. Those
    of MXFP4 and NVFP4, which are others, stay.

    Args:
        format: The format.
        blocks: The blocks, which are changed.
        scales: `[...]`.
    """
    assert blocks.shape[-1] == BLOCKS[format][1]
    if format in BITSANDBYTES_VALUES:
        blocks[..., :4] = scales.astype(np.float32)[..., None].view(np.uint8)
        return
    halves = scales.astype(np.float16)[..., None].view(np.uint8)
    if format == "IQ1_M":  # in the upper quarters of four words
        blocks[..., 49:56:2] &= 15
        blocks[..., 49:56:4] |= halves << 4
        blocks[..., 51:56:4] |= halves & 240
    for position in _HALVES.get(format, (0,)):
        blocks[..., position : position + 2] = halves
