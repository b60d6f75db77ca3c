"""The steps of the recurrence of xLSTM on the reference backend, see `Recurrence`, "mlstm"."""

from __future__ import annotations

import torch

from anydecode.kernels import elementary
from anydecode.kernels.interface import Recurrence


class MlstmSteps:
    """The inputs of some steps of a run, one entry of each tensor per step."""

    def __init__(self, shape: Recurrence, channels: torch.Tensor, gates: torch.Tensor) -> None:
        heads, dim, size = shape.num_heads, shape.head_dim, shape.state_size
        sizes = [heads * dim, heads * size, heads * size]
        values, keys, queries = torch.split(channels, sizes, -1)
        values = values.view(-1, heads, dim)
        self._value = torch.cat((values, torch.ones_like(values[..., :1])), -1).unsqueeze(-1)
        self._key, self._query = (x.view(-1, heads, 1, size) for x in (keys, queries))
        self._input, forget = torch.split(gates, [heads, heads], -1)
        self._forget = elementary.softplus(-forget)
        self._scale, self._eps = size**-0.5, shape.norm_eps

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        kept, added = state[:, -1, 0] - self._forget[index], self._input[index]
        largest = torch.maximum(kept, added)
        factors = elementary.exp(torch.stack((kept, added)) - largest)[..., None, None]
        changed = factors[0] * state[:, :-1] + factors[1] * self._value[index] * self._key[index]
        last = torch.zeros_like(state[:, -1:])
        last[:, 0, 0] = largest
        return torch.cat((changed, last), 1)

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state after it."""
        y = elementary.tree_sum(state[:, :-1] * self._query[index]) * self._scale
        least = elementary.exp(-state[:, -1, 0])
        return y[:, :-1] / (torch.maximum(y[:, -1].abs(), least) + self._eps).unsqueeze(-1)
