"""Rounding matrices to four bits so that what they give for typical inputs changes least (Frantar
et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323), into blocks of Q4_0: the `dtype` "int4" with better chosen codes."""

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

#: Added to the diagonal of what inputs have in common, as a share of its mean.
DAMPING = 0.01


class Inputs(ReferenceBackend):
    """Runs a model and sums x xᵀ over all inputs x of each matrix of its layers: `seen[name]`,
    float64 `[in_features, in_features]`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if ".layers." in weight.name:
            rows = x.double()
            self.seen[weight.name] = self.seen.get(weight.name, 0) + rows.T @ rows
        return super().linear(x, weight, bias)


def rounded(matrix: torch.Tensor, seen: torch.Tensor, name: str = "") -> Weight:
    """`matrix` `[out_features, in_features]` in Q4_0. From left to right each column is rounded and
    its error, weighted by the inverse of `seen`, is taken off the columns not yet rounded; a
    block's scale is that of its values when its turn comes."""
    values = matrix.double().clone()
    rows, columns = values.shape
    size = BLOCKS["Q4_0"][0]
    common = seen.clone()
    diagonal = common.diagonal()
    values[:, diagonal == 0] = 0
    diagonal += torch.where(diagonal == 0, 1.0, 0.0)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(common))
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


def calibrated(checkpoint: Checkpoint, network: Network, inputs: Inputs) -> Checkpoint:
    """The checkpoint with every matrix of `network`'s layers `rounded` for what `inputs` saw; open
    it as "int4". Raises `UnsupportedCombinationError` for experts, fused and odd matrices."""
    made: dict[str, torch.Tensor | Weight] = {}
    for weight in network.matrices():
        if ".layers." not in weight.name:
            continue
        key = f"{weight.name}.weight"
        if weight.name not in inputs.seen or key not in checkpoint.tensors:
            raise UnsupportedCombinationError(f"GPTQ cannot calibrate {weight.name} here")
        if weight.in_features % BLOCKS["Q4_0"][0]:
            raise UnsupportedCombinationError(f"{weight.name} does not divide into blocks of Q4_0")
        made[key] = rounded(dequantize(weight), inputs.seen[weight.name], weight.name)
    tensors: ChainMap[str, torch.Tensor | Weight] = ChainMap(made, dict(checkpoint.tensors))
    return replace(checkpoint, tensors=tensors)
