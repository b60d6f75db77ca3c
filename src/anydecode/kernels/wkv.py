"""The steps of the recurrences of RWKV-7 and RWKV-6, and of gated linear attention, on the
reference backend, see `Recurrence`, "wkv", "wkv6" and "gla"."""

from __future__ import annotations

import math

import torch

from anydecode.kernels import elementary
from anydecode.kernels.interface import Recurrence

#: Vectors are divided by their norms, or by this if they are shorter.
_MIN_NORM = 1e-12


class WkvSteps:
    """The inputs of some steps of a run, one entry of each tensor per step."""

    def __init__(
        self, shape: Recurrence, gates: torch.Tensor, weights: dict[str, torch.Tensor | None]
    ) -> None:
        size = (shape.num_heads, shape.head_dim)
        self._receptance, decay, key, self._value, rate = gates.view(-1, 5, *size).unbind(1)
        self._weights = {
            name: vector.view(size) for name, vector in weights.items() if vector is not None
        }
        self._decay = elementary.exp(elementary.sigmoid(decay) * -math.exp(-0.5)).unsqueeze(-2)
        rate = elementary.sigmoid(rate)
        removed = key * self._weights["key_scale"]
        norm = torch.sqrt(elementary.tree_sum(removed * removed)).clamp(min=_MIN_NORM)
        removed = removed / norm.unsqueeze(-1)
        self._removed, self._rated = removed.unsqueeze(-2), (removed * rate).unsqueeze(-2)
        self._added = key * ((rate - 1.0) * self._weights["key_rate"] + 1.0)
        self._bonus = elementary.tree_sum(self._receptance * self._added * self._weights["bonus"])
        self._eps = shape.norm_eps

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        removed = elementary.tree_sum(state * self._removed[index]).unsqueeze(-1)
        state = state * self._decay[index] - removed * self._rated[index]
        return state + self._value[index].unsqueeze(-1) * self._added[index].unsqueeze(-2)

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state after it."""
        y = elementary.tree_sum(state * self._receptance[index].unsqueeze(-2))
        if "norm" in self._weights:
            y = _normed(y, self._weights, self._eps)
        return y + self._value[index] * self._bonus[index].unsqueeze(-1)


class Wkv6Steps:
    """The same of RWKV-6."""

    def __init__(
        self, shape: Recurrence, gates: torch.Tensor, weights: dict[str, torch.Tensor | None]
    ) -> None:
        size = (shape.num_heads, shape.head_dim)
        self._receptance, decay, self._key, self._value = gates.view(-1, 4, *size).unbind(1)
        self._weights = {
            name: vector.view(size) for name, vector in weights.items() if vector is not None
        }
        self._decay = elementary.exp(-elementary.exp(decay)).unsqueeze(-2)
        self._bonus = elementary.tree_sum(self._receptance * (self._key * self._weights["bonus"]))
        self._eps = shape.norm_eps

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        added = self._value[index].unsqueeze(-1) * self._key[index].unsqueeze(-2)
        return state * self._decay[index] + added

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state before it."""
        y = elementary.tree_sum(state * self._receptance[index].unsqueeze(-2))
        y = y + self._value[index] * self._bonus[index].unsqueeze(-1)
        return _normed(y, self._weights, self._eps)


class GlaSteps:
    """The same of gated linear attention."""

    def __init__(self, shape: Recurrence, gates: torch.Tensor) -> None:
        heads, groups, dim = shape.num_heads, shape.num_groups, shape.head_dim
        parts = torch.split(gates.view(len(gates), -1, dim), [heads, heads, groups, groups], 1)
        self._receptance, decay, key, value = parts
        key, self._value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        self._decay = elementary.exp(-elementary.exp(decay).clamp(max=5.0))
        self._added = key * (1.0 - self._decay)
        self._scale = dim**-0.5

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        added = self._value[index].unsqueeze(-1) * self._added[index].unsqueeze(-2)
        return state * self._decay[index].unsqueeze(-2) + added

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state after it."""
        return elementary.tree_sum(state * self._receptance[index].unsqueeze(-2)) * self._scale


def _normed(y: torch.Tensor, weights: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
    """The layer norm of each head's output."""
    y = y - elementary.tree_sum(y).unsqueeze(-1) / y.shape[-1]
    variance = elementary.tree_sum(y * y).unsqueeze(-1) / y.shape[-1]
    return y / torch.sqrt(variance + eps) * weights["norm"] + weights["norm_bias"]
