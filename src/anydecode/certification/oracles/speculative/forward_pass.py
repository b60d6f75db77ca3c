"""A forward pass of a Llama, position by position, with some of its layers in parallel or with
early exits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from anydecode.models.network import GatedMlp
from anydecode.models.transformer import Transformer


class Forward:
    """A Llama whose key-value cache is two lists per layer. `step` adds a position, layer by layer
    or with groups of layers in parallel, and returns its logits."""

    def __init__(self, model: Transformer) -> None:
        self.spec, self.weights = model.spec, model.network.weights
        self.keys: list[list[torch.Tensor]] = [[] for _ in self.weights.layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in self.weights.layers]

    def step(self, token: int, group: int = 1) -> torch.Tensor:
        x = self.weights.embedding.data[token]
        last = len(self.weights.layers) - 1
        inner = list(range(1, last))
        groups = [[0], *(inner[i : i + group] for i in range(0, len(inner), group)), [last]]
        for members in groups:
            before = x
            for layer in members:
                x = x + self._attention(before, layer)
                x = x + self._mlp(x, layer)
        return self._normed(x, self.weights.final_norm) @ self.weights.head.data.T

    def exits(self, token: int, stops: Sequence[int]) -> list[torch.Tensor]:
        """Adds a position; returns the logits computed after each of `stops` layers."""
        x, logits = self.weights.embedding.data[token], []
        for layer in range(len(self.weights.layers)):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if layer + 1 in stops:
                normed = self._normed(x, self.weights.final_norm)
                logits.append(normed @ self.weights.head.data.T)
        return logits

    def forget(self, length: int) -> None:
        """Keeps only the first `length` positions."""
        for cached in (*self.keys, *self.values):
            del cached[length:]

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        return x / (x.pow(2).mean() + self.spec.norm_eps).sqrt() * weight

    def _mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        weights = self.weights.layers[layer]
        mlp = weights.mlp
        assert isinstance(mlp, GatedMlp)
        y = self._normed(x, weights.mlp_norm)
        inner = silu(mlp.gate.weight.data @ y) * (mlp.up.weight.data @ y)
        return mlp.down.weight.data @ inner

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        weights, spec = self.weights.layers[layer], self.spec.layers[layer]
        shape, position = spec.attention, len(self.keys[layer])
        y = self._normed(x, weights.attention_norm)

        def rotated(vector: torch.Tensor, heads: int) -> torch.Tensor:
            assert spec.rope is not None
            a, b = vector.view(heads, 2, -1).unbind(1)
            angle = position * spec.rope.frequencies
            return torch.cat(
                [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1
            )

        q = rotated(weights.query.weight.data @ y, shape.num_heads)
        self.keys[layer].append(rotated(weights.key.weight.data @ y, shape.num_kv_heads))
        self.values[layer].append((weights.value.weight.data @ y).view(shape.num_kv_heads, -1))
        shared = shape.num_heads // shape.num_kv_heads
        k = torch.stack(self.keys[layer]).repeat_interleave(shared, 1)
        v = torch.stack(self.values[layer]).repeat_interleave(shared, 1)
        weight = (torch.einsum("hd,khd->hk", q, k) * shape.scale).softmax(1)
        return weights.output.weight.data @ torch.einsum("hk,khd->hd", weight, v).flatten()
