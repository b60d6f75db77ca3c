"""A forward pass of a Llama, position by position, with some of its layers in parallel or with
early exits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anydecode.certification.oracles.transformer import gated_mlp, rms_norm, rotate, softmax
from anydecode.models.network import Network


class Forward:
    """A Llama in float64 whose key-value cache is two lists per layer. `step` adds a position,
    layer by layer or with groups of layers in parallel, and returns its logits."""

    def __init__(self, network: Network) -> None:
        self.spec, self.weights = network.spec, network.weights
        self.keys: list[list[np.ndarray]] = [[] for _ in self.weights.layers]
        self.values: list[list[np.ndarray]] = [[] for _ in self.weights.layers]

    def step(self, token: int, group: int = 1) -> np.ndarray:
        x = self._embedding(token)
        last = len(self.weights.layers) - 1
        inner = list(range(1, last))
        groups = [[0], *(inner[i : i + group] for i in range(0, len(inner), group))]
        if last:
            groups.append([last])
        for members in groups:
            before = x
            for layer in members:
                x = x + self._attention(before, layer)
                x = x + self._mlp(x, layer)
        return self._logits(x)

    def exits(self, token: int, stops: Sequence[int]) -> list[np.ndarray]:
        """Adds a position; returns the logits computed after each of `stops` layers."""
        x, logits = self._embedding(token), []
        for layer in range(len(self.weights.layers)):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if layer + 1 in stops:
                logits.append(self._logits(x))
        return logits

    def _embedding(self, token: int) -> np.ndarray:
        return self.weights.embedding.data[token].astype(np.float64)

    def _logits(self, x: np.ndarray) -> np.ndarray:
        return self._normed(x, self.weights.final_norm) @ self.weights.head.data.T

    def _normed(self, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        return rms_norm(x, weight, self.spec.norm_eps)

    def _mlp(self, x: np.ndarray, layer: int) -> np.ndarray:
        weights = self.weights.layers[layer]
        assert weights.mlp is not None
        return gated_mlp(self._normed(x, weights.mlp_norm), weights.mlp)

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        weights, spec = self.weights.layers[layer], self.spec.layers[layer]
        shape, position = spec.attention, len(self.keys[layer])
        assert shape and weights.query and weights.key and weights.value and weights.output
        y = self._normed(x, weights.attention_norm)

        def rotated(vector: np.ndarray, heads: int) -> np.ndarray:
            assert spec.rope is not None
            return rotate(vector.reshape(1, heads, -1), [position], spec.rope.frequencies)[0]

        q = rotated(weights.query.weight.data @ y, shape.num_heads)
        self.keys[layer].append(rotated(weights.key.weight.data @ y, shape.num_kv_heads))
        self.values[layer].append((weights.value.weight.data @ y).reshape(shape.num_kv_heads, -1))
        shared = shape.num_heads // shape.num_kv_heads
        k = np.stack(self.keys[layer]).repeat(shared, 1)
        v = np.stack(self.values[layer]).repeat(shared, 1)
        weight = softmax(np.einsum("hd,khd->hk", q, k) * shape.scale)
        mixed = np.einsum("hk,khd->hd", weight, v)
        output: np.ndarray = weights.output.weight.data @ mixed.reshape(-1)
        return output
