"""Convolutions and recurrences of the reference backend, one position after the other."""

from __future__ import annotations

import torch

from anydecode.kernels import elementary
from anydecode.kernels.interface import Recurrence
from anydecode.kernels.mlstm import MlstmSteps
from anydecode.kernels.recurrent import Scan
from anydecode.kernels.torch_arrays import as_tensor
from anydecode.kernels.wkv import GlaSteps, Wkv6Steps, WkvSteps

#: Added to the sum of squares that keys and queries of the delta rule are divided by the root of.
_NORM_EPS = 1e-6
#: The inputs of this many steps are computed together.
_STEPS = 32


def convolve(
    stored: torch.Tensor,
    table: torch.Tensor,
    shape: Recurrence,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The convolution and its activation, float32 `[rows, width]`.

    Args:
        stored: The inputs by slot, float32 `[slots, width + num_gates]`.
        table: The slots of each row's window, int64 `[rows, window]`; -1: before the first.
        shape: The layer's recurrence.
        weight: float32 `[width, window]`.
        bias: float32 `[width]`, or None.
    """
    result = torch.zeros(len(table), shape.width, device=stored.device)
    for offset in range(shape.window):
        slots = table[:, offset]
        taps = stored[slots.clamp(min=0), : shape.width] * weight[:, offset]
        result = result + taps.masked_fill((slots < 0).unsqueeze(-1), 0.0)
    if bias is not None:
        result = result + bias
    return elementary.ACTIVATIONS[shape.activation or "identity"](result)


def run_scan(
    scan: Scan,
    stored: torch.Tensor,
    states: torch.Tensor,
    num_rows: int,
    shape: Recurrence,
    weights: dict[str, torch.Tensor | None],
) -> torch.Tensor:
    """Run the steps of `scan` on `states`; returns the outputs of the rows, float32 `[num_rows,
    width_out]`.

    Args:
        scan: The steps.
        stored: The inputs by slot, float32 `[slots, width + num_gates]`.
        states: float32 `[num_states, num_heads, head_dim, state_size]`, changed in place.
        num_rows: The number of rows.
        shape: The layer's recurrence.
        weights: The fields of `RecurrenceWeights` or `WkvWeights`.
    """
    out = torch.empty(num_rows, shape.num_heads, shape.head_dim, device=stored.device)
    branches: dict[int, torch.Tensor] = {}
    assert shape.state_shape is not None
    for run, begin in enumerate(scan.start.tolist()):
        part = slice(int(scan.first[run]), int(scan.first[run + 1]))
        slots = as_tensor(scan.slots[part], stored.device).long()
        own = slots[scan.lead :]
        table = slots[scan.lead + 1 - shape.window :].unfold(0, shape.window, 1)
        if begin < -1:
            state = branches[begin]
        else:
            zeros = torch.zeros(shape.state_shape, device=stored.device)
            state = zeros if begin < 0 else states[begin].clone()
        rows, saves = scan.rows[part][scan.lead :].tolist(), scan.saves[part][scan.lead :].tolist()
        for first in range(0, len(own), _STEPS):
            group = slice(first, first + _STEPS)
            gates = stored[own[group], shape.width :]
            is_first = begin == -1 and first == 0
            steps = _steps(shape, stored, table[group], gates, weights, is_first)
            for index, (row, save) in enumerate(zip(rows[group], saves[group], strict=True)):
                before, state = state, steps.advance(state, index)
                if row >= 0:
                    is_older = shape.rule == "wkv6"
                    out[row] = steps.output(before if is_older else state, index)
                if save >= 0:
                    states[save] = state
                elif save < -1:
                    branches[save] = state
    return out.flatten(-2)


def _steps(
    shape: Recurrence,
    stored: torch.Tensor,
    table: torch.Tensor,
    gates: torch.Tensor,
    weights: dict[str, torch.Tensor | None],
    is_first: bool,
) -> _Steps | WkvSteps | Wkv6Steps | GlaSteps | MlstmSteps | _LruSteps:
    """The steps of some positions of a run; `table` has the slots of their windows. `is_first`:
    whether they start at position 0."""
    if shape.rule == "wkv":
        return WkvSteps(shape, gates, weights)
    if shape.rule == "wkv6":
        return Wkv6Steps(shape, gates, weights)
    if shape.rule == "gla":
        return GlaSteps(shape, gates)
    if shape.rule == "mlstm":
        return MlstmSteps(shape, stored[table[:, 0], : shape.width], gates)
    conv = weights["conv"]
    assert conv is not None
    channels = convolve(stored, table, shape, conv, weights["conv_bias"])
    if shape.rule == "lru":
        return _LruSteps(shape, channels, gates, weights, is_first)
    return _Steps(shape, channels, gates, weights)


class _Steps:
    """The inputs of some steps of a run, one entry of each tensor per step."""

    def __init__(
        self,
        shape: Recurrence,
        channels: torch.Tensor,
        gates: torch.Tensor,
        weights: dict[str, torch.Tensor | None],
    ) -> None:
        heads, groups = shape.num_heads, shape.num_groups
        num_values, num_keys = heads * shape.head_dim, groups * shape.state_size
        self._is_delta = shape.rule in ("delta", "kda")
        if shape.rule == "selective":
            keys, queries, gates = torch.split(gates, [num_keys, num_keys, num_values], -1)
            channels = torch.cat((channels, keys, queries), -1)
        values, keys, queries = torch.split(channels, [num_values, num_keys, num_keys], -1)
        self._value = values.view(-1, heads, shape.head_dim)
        key, query = (x.view(-1, groups, shape.state_size) for x in (keys, queries))
        if self._is_delta:
            key, query = _unit(key), _unit(query) * shape.state_size**-0.5
        group = torch.arange(heads, device=key.device)
        group = group % groups if shape.has_tiled_keys else group // (heads // groups)
        self._key, self._query = (x[:, group].unsqueeze(-2) for x in (key, query))
        decay, bias, skip = weights["decay"], weights["step_bias"], weights["skip"]
        assert decay is not None
        self._skip = None if skip is None else skip.view(heads, -1)
        if shape.rule == "retention":
            self._strength = torch.ones(len(channels), 1, 1, device=channels.device)
            self._decay = elementary.exp(decay).view(heads, 1, 1).expand(len(channels), -1, -1, -1)
            return
        assert bias is not None
        gate = gates[:, -bias.numel() :] + bias
        step = elementary.softplus(gate).clamp(*shape.step_limits)
        if shape.min_exponent < 0:
            rates = gate.view(len(gate), heads, 1, -1) * -decay.view(heads, 1, 1)
            self._decay = elementary.exp(elementary.sigmoid(rates) * shape.min_exponent)
        elif shape.rule == "kda":
            step = step.view(len(step), heads, 1, -1)
            self._decay = elementary.exp(step * decay.view(heads, 1, 1))
        else:  # of each head, or of each of its channels: [heads, 1] or [heads, head_dim]
            step = step.view(len(step), heads, -1)
            decay = decay.view(heads, step.shape[-1], -1)
            self._decay = elementary.exp(step.unsqueeze(-1) * decay)
            self._strength = step
        if self._is_delta:
            strength = elementary.sigmoid(gates[:, :heads]) * shape.max_strength
            self._strength = strength.unsqueeze(-1)

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        state, value, key = state * self._decay[index], self._value[index], self._key[index]
        if self._is_delta:
            value = value - elementary.tree_sum(state * key)
        return state + (value * self._strength[index]).unsqueeze(-1) * key

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state after it."""
        y = elementary.tree_sum(state * self._query[index])
        return y if self._skip is None else y + self._value[index] * self._skip


class _LruSteps:
    """The same with the rule "lru"."""

    def __init__(
        self,
        shape: Recurrence,
        channels: torch.Tensor,
        gates: torch.Tensor,
        weights: dict[str, torch.Tensor | None],
        is_first: bool,
    ) -> None:
        decay, bias = weights["decay"], weights["step_bias"]
        assert decay is not None and bias is not None
        inputs, recurrence = elementary.sigmoid(gates + bias).chunk(2, -1)
        exponent = recurrence * decay
        factor = torch.sqrt(1.0 - elementary.exp(exponent * 2.0))
        if is_first:
            factor[0] = 1.0
        size = (-1, *shape.state_shape) if shape.state_shape else (-1,)
        self._decay = elementary.exp(exponent).view(size)
        self._change = (channels * inputs * factor).view(size)

    def advance(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state after step `index`, from the one before it."""
        return state * self._decay[index] + self._change[index]

    def output(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The output `[num_heads, head_dim]` of step `index`, from the state after it."""
        return state.squeeze(-1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors divided by their norms."""
    return x / torch.sqrt(elementary.tree_sum(x * x) + _NORM_EPS).unsqueeze(-1)
