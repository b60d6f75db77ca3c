"""GPTQ: quantises matrices to Q4_0 (`dtype` "int4") with codes that minimise the error of a layer's
outputs on calibration inputs.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import BLOCKS, dequantize, quantize
from anydecode.kernels.interface import Weight
from anydecode.kernels.reference import ReferenceBackend
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: Added to the diagonal of the Hessian, as a fraction of its mean.
DAMPING = 0.01


class CalibrationStatistics(ReferenceBackend):
    """Runs a model and accumulates the Hessian of each matrix of its layers, up to a factor: the
    sum of x xᵀ over all inputs x. `hessians[name]` is float64 `[in_features, in_features]`."""

    def __init__(self) -> None:
        super().__init__()
        self.hessians: dict[str, torch.Tensor] = {}

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if ".layers." in weight.name:
            rows = x.double()
            self.hessians[weight.name] = self.hessians.get(weight.name, 0) + rows.T @ rows
        return super().linear(x, weight, bias)


def quantize_matrix(matrix: torch.Tensor, hessian: torch.Tensor, name: str = "") -> Weight:
    """Quantise `matrix` `[out_features, in_features]` to Q4_0 by GPTQ.

    Columns are rounded from left to right. Each column's error, weighted by the inverse Hessian, is
    subtracted from the columns not yet rounded. The scale of a block is computed from its values at
    the time the block is reached.

    Args:
        matrix: The weights.
        hessian: The sum of x xᵀ over the calibration inputs, float64 `[in_features, in_features]`.
        name: The name of the result.
    """
    values = matrix.double().clone()
    rows, columns = values.shape
    size = BLOCKS["Q4_0"][0]
    damped = hessian.clone()
    diagonal = damped.diagonal()
    values[:, diagonal == 0] = 0
    diagonal += torch.where(diagonal == 0, 1.0, 0.0)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    blocks = []
    for start in range(0, columns, size):
        block = quantize(values[:, start : start + size].float(), "Q4_0").data
        scale = block[:, :2].contiguous().view(torch.float16).double()[:, 0]
        codes = torch.empty(rows, size, dtype=torch.uint8)
        for column in range(start, start + size):
            scaled = torch.where(scale == 0, 0.0, values[:, column] / scale)
            code = ((scaled + 8.5).floor()).clamp(0, 15)
            codes[:, column - start] = code.to(torch.uint8)
            error = (values[:, column] - (code - 8) * scale) / upper[column, column]
            values[:, column:] -= error[:, None] * upper[column, column:]
        half = size // 2
        blocks += [block[:, :2], codes[:, :half] | (codes[:, half:] << 4)]
    return Weight("Q4_0", rows, columns, torch.cat(blocks, 1), name)


def quantize_checkpoint(
    checkpoint: Checkpoint, network: Network, statistics: CalibrationStatistics
) -> Checkpoint:
    """Quantise every matrix of the layers of `network`; open the result as "int4".

    Args:
        checkpoint: The checkpoint of `network`.
        network: The model.
        statistics: The Hessians of its matrices, after the calibration passes.

    Raises:
        UnsupportedCombinationError: A matrix is part of a mixture of experts, fused, or its width
            is not a multiple of the block size.
    """
    quantized: dict[str, torch.Tensor | Weight] = {}
    for weight in network.matrices():
        if ".layers." not in weight.name:
            continue
        key = f"{weight.name}.weight"
        if weight.name not in statistics.hessians or key not in checkpoint.tensors:
            raise UnsupportedCombinationError(f"GPTQ cannot calibrate {weight.name} here")
        if weight.in_features % BLOCKS["Q4_0"][0]:
            raise UnsupportedCombinationError(f"{weight.name} does not divide into blocks of Q4_0")
        quantized[key] = quantize_matrix(
            dequantize(weight), statistics.hessians[weight.name], weight.name
        )
    tensors: ChainMap[str, torch.Tensor | Weight] = ChainMap(quantized, dict(checkpoint.tensors))
    return replace(checkpoint, tensors=tensors)
