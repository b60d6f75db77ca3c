"""Draft steps that are unrolled in training, as EAGLE-3's training-time test (arXiv:2503.01840) and
HASS (arXiv:2408.15766) do: each step reads the states of the step before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from anydecode.training.drafters.layers import Projections


class UnrolledAttention:
    """The attention of unrolled draft steps. Row t of a step attends to the rows of the first step
    up to t, and to itself in the steps since.

    Args:
        projections: Its matrices.
    """

    def __init__(self, projections: Projections) -> None:
        self.projections = projections
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the next step's rows, `[batch, rows, width]`, from what they read."""
        projections, rows = self.projections, x.shape[1]
        positions = torch.arange(rows) + 1 + len(self._keys)
        self._keys.append(projections.keys(x, positions))
        self._values.append(projections.values(x))
        q = projections.queries(x, positions)
        own = list(zip(self._keys[1:], self._values[1:], strict=True))
        return projections.output(attend_rows(q, self._keys[0], self._values[0], own))


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """The mixed values of rows, each of which attends to the rows up to it of `keys` and `values`,
    and to itself in each pair of `own`; all `[batch, heads, rows, head_width]`."""
    rows = q.shape[2]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    first = (q @ keys.transpose(-1, -2)).masked_fill(~causal, float("-inf"))
    others = [(q * key).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.softmax(torch.cat([first, *others], -1).float(), -1).to(values.dtype)
    mixed = weights[..., :rows] @ values
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., rows + index, None] * value
    return mixed


def following(tokens: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """The tokens that the rows of each step read, `[batch, length - 1]`: of step i and row t that
    at position t + 1 + i; behind the text any."""
    rows = tokens.shape[1] - 1
    padded = functional.pad(tokens, (0, steps))
    for step in range(steps):
        yield padded[:, 1 + step : 1 + step + rows]
