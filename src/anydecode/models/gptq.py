"""GPTQ: quantises matrices to Q4_0 (`dtype` "int4") with codes that minimise the error of a layer's
outputs on calibration inputs.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import BLOCKS, dequantize, quantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: Added to the diagonal of the Hessian, as a fraction of its mean.
DAMPING = 0.01


def quantize_matrix(matrix: np.ndarray, hessian: np.ndarray, name: str = "") -> Weight:
    """Quantise `matrix` `[out_features, in_features]` to Q4_0 by GPTQ.

    Columns are rounded from left to right. Each column's error, weighted by the inverse Hessian, is
    subtracted from the columns not yet rounded. The scale of a block is computed from its values at
    the time the block is reached.

    Args:
        matrix: The weights.
        hessian: The sum of x xᵀ over the calibration inputs, float64 `[in_features, in_features]`.
        name: The name of the result.
    """
    values = matrix.astype(np.float64)
    rows, columns = values.shape
    size = BLOCKS["Q4_0"][0]
    diagonal = hessian.diagonal()
    values[:, diagonal == 0] = 0
    diagonal = np.where(diagonal == 0, 1.0, diagonal)
    damped = hessian.copy()
    np.fill_diagonal(damped, diagonal + DAMPING * diagonal.mean())
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    blocks = []
    for start in range(0, columns, size):
        block = quantize(values[:, start : start + size].astype(np.float32), "Q4_0").data
        scale = np.ascontiguousarray(block[:, :2]).view(np.float16).astype(np.float64)[:, 0]
        codes = np.empty((rows, size), np.uint8)
        for column in range(start, start + size):
            scaled = np.divide(values[:, column], scale, out=np.zeros(rows), where=scale != 0)
            code = np.floor(scaled + 8.5).clip(0, 15)
            codes[:, column - start] = code
            error = (values[:, column] - (code - 8) * scale) / upper[column, column]
            values[:, column:] -= error[:, None] * upper[column, column:]
        half = size // 2
        blocks += [block[:, :2], codes[:, :half] | (codes[:, half:] << 4)]
    return Weight("Q4_0", rows, columns, np.concatenate(blocks, 1), name)


def quantize_checkpoint(
    checkpoint: Checkpoint, network: Network, hessians: Mapping[str, np.ndarray]
) -> Checkpoint:
    """Quantise every matrix of the layers of `network`; open the result as "int4".

    Args:
        checkpoint: The checkpoint of `network`.
        network: The model.
        hessians: By the name of a matrix, the sum of x xᵀ over its calibration inputs.

    Raises:
        UnsupportedCombinationError: A matrix is part of a mixture of experts, fused, or its width
            is not a multiple of the block size.
    """
    quantized: dict[str, np.ndarray | Weight] = {}
    for weight in network.matrices():
        if ".layers." not in weight.name:
            continue
        key = f"{weight.name}.weight"
        if weight.name not in hessians or key not in checkpoint.tensors:
            raise UnsupportedCombinationError(f"GPTQ cannot calibrate {weight.name} here")
        if weight.in_features % BLOCKS["Q4_0"][0]:
            raise UnsupportedCombinationError(f"{weight.name} does not divide into blocks of Q4_0")
        quantized[key] = quantize_matrix(dequantize(weight), hessians[weight.name], weight.name)
    tensors: ChainMap[str, np.ndarray | Weight] = ChainMap(quantized, dict(checkpoint.tensors))
    return replace(checkpoint, tensors=tensors)
