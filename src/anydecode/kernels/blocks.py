"""Runs single layers on whole texts with gradients, while their matrices are replaced by others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Attention, Biases, Weight
from anydecode.kernels.reference import ReferenceBackend
from anydecode.kernels.torch_arrays import as_tensor


class BlockBackend(ReferenceBackend):
    """The reference for causal texts of equal length: hidden states are `[texts * length, width]`.

    Nothing is stored in a cache, and sums are not batch-invariant.

    Args:
        length: Tokens per text.

    Attributes:
        matrices: What products multiply by, float32 `[out_features, in_features]` by the name of
            the weight; other weights are used as they are.
        largest: By the name of a weight, the largest absolute value of each input so far, float32
            `[in_features]`.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.matrices: Mapping[str, torch.Tensor] = {}
        self.largest: dict[str, torch.Tensor] = {}
        self._length = length

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: np.ndarray | None = None
    ) -> torch.Tensor:
        matrix = self.matrices.get(weight.name)
        if matrix is None:
            largest = x.detach().abs().amax(0)
            known = self.largest.get(weight.name)
            self.largest[weight.name] = largest if known is None else torch.maximum(known, largest)
            matrix = as_tensor(dequantize(weight))
        return functional.linear(x, matrix, None if bias is None else self._vector(bias))

    def store(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: int,
        shape: Attention,
        index_key: torch.Tensor | None = None,
    ) -> None:
        self._kept = k, v

    def select(
        self,
        q: torch.Tensor | None,
        weights: torch.Tensor | np.ndarray | None,
        num_heads: int,
        layer: int,
        shape: Attention,
    ) -> None:
        if shape.top_k is not None and self._length > shape.top_k:
            raise UnsupportedCombinationError(
                f"texts of {self._length} tokens cannot be calibrated here: rows attend to"
                f" {shape.top_k} selected positions"
            )

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        k, v = self._kept
        is_windowed = shape.window is not None and shape.window < self._length
        limits = (shape.softcap, shape.chunk, shape.slopes, shape.latent_dim, shape.value_size)
        others = (*limits, sinks, biases)
        if is_windowed or k is None or v is None or any(other is not None for other in others):
            raise UnsupportedCombinationError(
                "layers with windows, soft caps, chunks, biases by distance, sinks, smaller values"
                " or latent attention cannot be calibrated here"
            )
        q, k, v = (
            part.view(-1, self._length, heads, shape.head_dim).transpose(1, 2)
            for part, heads in (
                (q, shape.num_heads),
                (k, shape.num_kv_heads),
                (v, shape.num_kv_heads),
            )
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(-1, shape.num_heads * shape.head_dim)

    def rope_positions(self, count: int) -> tuple[torch.Tensor, int]:
        return torch.arange(self._length).repeat(count // self._length), self._length - 1
