"""Gradients of a network's weights, in numpy: `Tape` computes a whole text like a backend and
records what the way back needs.

It has the operations of a causal transformer with rotary positions, RMS norms and gated MLPs. It
is for training small models, not for inference: results have other bits than those of a backend.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.kernels.interface import Attention, Biases, Rope, Weight


class Variable:
    """A value of the forward pass, float32 `[rows, width]`, with the loss's gradient in it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.gradient = np.zeros_like(data)


class Tape:
    """The operations that `Network.layer` and `Network.head` call, over consecutive positions of
    one text.

    Args:
        positions: The positions of the rows, int64 `[rows]`, ascending by one.

    Attributes:
        gradients: By the id of an array of weights, the gradient in it.
    """

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = positions
        self.gradients: dict[int, np.ndarray] = {}
        self._back: list[Callable[[], None]] = []

    def backward(self, output: Variable, gradient: np.ndarray) -> None:
        """Compute `gradients` from the gradient of the loss in `output`."""
        output.gradient += gradient
        for step in reversed(self._back):
            step()

    def embed(self, tokens: np.ndarray, table: np.ndarray, scale: float) -> Variable:
        """The rows `tokens` of the embedding `table`, times `scale`."""
        y = Variable(table[tokens] * np.float32(scale))

        def back() -> None:
            np.add.at(self._gradient(table), tokens, y.gradient * np.float32(scale))

        return self._recorded(y, back)

    def rms_norm(
        self, x: Variable, weight: np.ndarray | None, eps: float, groups: int = 1
    ) -> Variable:
        """See `Backend.rms_norm`."""
        parts = x.data.reshape(len(x.data), groups, -1)
        size = 1 / np.sqrt((parts * parts).mean(-1, keepdims=True) + np.float32(eps))
        normed = parts * size
        has_part_each = weight is not None and weight.size == x.data.shape[-1]
        factor = None if weight is None else weight.reshape(groups if has_part_each else 1, -1)
        y = Variable((normed if factor is None else normed * factor).reshape(x.data.shape))

        def back() -> None:
            out = y.gradient.reshape(normed.shape)
            if weight is not None and factor is not None:
                change = (out * normed).sum(0)
                change = change if has_part_each else change.sum(0)
                self._gradient(weight)[...] += change.reshape(weight.shape)
                out = out * factor
            change = size * (out - normed * (out * normed).mean(-1, keepdims=True))
            x.gradient += change.reshape(x.data.shape)

        return self._recorded(y, back)

    def linear(self, x: Variable, weight: Weight, bias: np.ndarray | None = None) -> Variable:
        """See `Backend.linear`."""
        matrix, scale = weight.data, np.float32(weight.scale)
        y = Variable((x.data @ matrix.T) * scale + (0 if bias is None else bias))

        def back() -> None:
            x.gradient += (y.gradient @ matrix) * scale
            self._gradient(matrix)[...] += (y.gradient.T @ x.data) * scale
            if bias is not None:
                self._gradient(bias)[...] += y.gradient.sum(0)

        return self._recorded(y, back)

    def rope(self, x: Variable, num_heads: int, rope: Rope) -> Variable:
        """See `Backend.rope`; without growth."""
        angles = self.positions[:, None].astype(np.float64) * rope.frequencies
        cos, sin = (
            (function(angles) * rope.factor).astype(np.float32)[:, None, :]
            for function in (np.cos, np.sin)
        )

        def rotated(rows: np.ndarray, sin: np.ndarray) -> np.ndarray:
            heads, half = rows.reshape(len(rows), num_heads, -1), cos.shape[-1]
            first, second = heads[..., :half], heads[..., half : 2 * half]
            pair = (first * cos - second * sin, second * cos + first * sin)
            return np.concatenate([*pair, heads[..., 2 * half :]], -1).reshape(rows.shape)

        y = Variable(rotated(x.data, sin))

        def back() -> None:
            x.gradient += rotated(y.gradient, -sin)

        return self._recorded(y, back)

    def attention(
        self,
        q: Variable,
        k: Variable,
        v: Variable,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> Variable:
        """Causal attention of every row to all rows up to itself."""
        count, kv_heads = len(q.data), shape.num_kv_heads
        # Axes: key-value head, query head of it, row, numbers.
        queries = q.data.reshape(count, kv_heads, -1, shape.head_dim).transpose(1, 2, 0, 3)
        keys, values = (
            one.data.reshape(count, kv_heads, -1).transpose(1, 0, 2)[:, None] for one in (k, v)
        )
        scale = np.float32(shape.scale)
        scores = (queries @ keys.swapaxes(-1, -2)) * scale
        scores += np.where(np.tri(count, dtype=bool), np.float32(0), np.float32(-np.inf))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = shares @ values
        y = Variable(mixed.transpose(2, 0, 1, 3).reshape(count, -1))

        def back() -> None:
            out = y.gradient.reshape(count, kv_heads, -1, values.shape[-1]).transpose(1, 2, 0, 3)
            of_shares = out @ values.swapaxes(-1, -2)
            of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdims=True)) * scale
            q.gradient += (of_scores @ keys).transpose(2, 0, 1, 3).reshape(q.data.shape)
            for one, gradient in (
                (k, (of_scores.swapaxes(-1, -2) @ queries).sum(1)),
                (v, (shares.swapaxes(-1, -2) @ out).sum(1)),
            ):
                one.gradient += gradient.transpose(1, 0, 2).reshape(one.data.shape)

        return self._recorded(y, back)

    def gated(self, gate: Variable, up: Variable, activation: str) -> Variable:
        """See `Backend.gated`; for the activation "silu"."""
        sigmoid = 1 / (1 + np.exp(-gate.data))
        active = gate.data * sigmoid
        y = Variable(active * up.data)

        def back() -> None:
            slope = sigmoid * (1 + gate.data * (1 - sigmoid))
            gate.gradient += y.gradient * up.data * slope
            up.gradient += y.gradient * active

        return self._recorded(y, back)

    def add(self, x: Variable, y: Variable) -> Variable:
        """See `Backend.add`."""
        z = Variable(x.data + y.data)

        def back() -> None:
            x.gradient += z.gradient
            y.gradient += z.gradient

        return self._recorded(z, back)

    def scale(self, x: Variable, factor: float) -> Variable:
        """See `Backend.scale`."""
        y = Variable(x.data * np.float32(factor))

        def back() -> None:
            x.gradient += y.gradient * np.float32(factor)

        return self._recorded(y, back)

    def _recorded(self, y: Variable, back: Callable[[], None]) -> Variable:
        self._back.append(back)
        return y

    def _gradient(self, array: np.ndarray) -> np.ndarray:
        """The gradient in an array of weights so far."""
        if id(array) not in self.gradients:
            self.gradients[id(array)] = np.zeros_like(array)
        return self.gradients[id(array)]
