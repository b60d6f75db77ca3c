"""Blocks of Mamba in front of exit routers (DYNAMAX, arXiv:2504.20922): each reads one state per
token, and remembers those before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import ByExit

PARTS = (
    "norm", "in_proj", "conv", "conv_bias", "x_proj", "dt_proj", "dt_bias", "a_log", "skip",
    "out_proj",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class MambaState:
    """What a block remembers of a text.

    Attributes:
        inputs: The last inputs of the convolution, float64 `[window - 1, width]`.
        state: Of the recurrence, float64 `[width, state_size]`.
    """

    inputs: np.ndarray
    state: np.ndarray


@dataclass(frozen=True, eq=False)
class MambaBlocks:
    """The blocks of one model, by number of layers before the exit.

    With y = norm(x), inputs u and gates z are in_proj(y). A causal convolution over the tokens and
    silu follow on u. With (r, b, c) = x_proj(u) and dt = softplus(dt_proj(r) + dt_bias), the state
    becomes exp(-exp(a_log) dt) state + dt u b. A block adds out_proj((state c + skip u) silu(z)).

    Attributes:
        norm: Weights of an RMS norm, float32 `[hidden_size]`.
        in_proj: float32 `[2 * width, hidden_size]`.
        conv: float32 `[width, window]`, the weight of the newest input last.
        conv_bias: float32 `[width]`.
        x_proj: float32 `[rank + 2 * state_size, width]`.
        dt_proj: float32 `[width, rank]`.
        dt_bias: float32 `[width]`.
        a_log: float32 `[width, state_size]`.
        skip: float32 `[width]`.
        out_proj: float32 `[hidden_size, width]`.
    """

    norm: ByExit
    in_proj: ByExit
    conv: ByExit
    conv_bias: ByExit
    x_proj: ByExit
    dt_proj: ByExit
    dt_bias: ByExit
    a_log: ByExit
    skip: ByExit
    out_proj: ByExit

    def start(self, exit: int) -> MambaState:
        """What the block of `exit` remembers before the first token."""
        width, window = self.conv[exit].shape
        return MambaState(np.zeros((window - 1, width)), np.zeros(self.a_log[exit].shape))

    def __call__(
        self, exit: int, x: np.ndarray, before: MambaState, eps: float
    ) -> tuple[np.ndarray, MambaState]:
        """What the block of `exit` adds to a state x, both `[hidden_size]`, and what it remembers
        from then on. Sums have a fixed order."""
        y = x.astype(np.float64)
        y = y / np.sqrt((y * y).mean() + eps) * self.norm[exit]
        u, gate = np.split((self.in_proj[exit] * y).sum(-1), 2)
        inputs = np.concatenate([before.inputs, u[None]])
        u = _silu((inputs * self.conv[exit].T).sum(0) + self.conv_bias[exit])
        size, rank = self.a_log[exit].shape[1], self.dt_proj[exit].shape[1]
        selected = (self.x_proj[exit] * u).sum(-1)
        step = (self.dt_proj[exit] * selected[:rank]).sum(-1) + self.dt_bias[exit]
        step = np.logaddexp(0.0, step)[:, None]
        decay = np.exp(-np.exp(self.a_log[exit].astype(np.float64)) * step)
        state = decay * before.state + step * u[:, None] * selected[rank : rank + size]
        out = (state * selected[rank + size :]).sum(-1) + self.skip[exit] * u
        added: np.ndarray = (self.out_proj[exit] * (out * _silu(gate))).sum(-1)
        return added, MambaState(inputs[1:], state)

    def check_shapes(self, what: str) -> None:
        """Raise CheckpointError, about `what`, unless the parts of each block fit together."""
        for exit in self.norm:
            parts = [getattr(self, part)[exit] for part in PARTS]
            shapes = [part.shape for part in parts]
            sizes = [self.norm[exit].size, *self.conv[exit].shape[:2]]
            sizes += [*self.a_log[exit].shape[1:], *self.dt_proj[exit].shape[1:]]
            if len(sizes) == 5:
                size, width, window, num_states, rank = sizes
                expected = [
                    (size,), (2 * width, size), (width, window), (width,),
                    (rank + 2 * num_states, width), (width, rank), (width,), (width, num_states),
                    (width,), (size, width),
                ]  # fmt: skip
                if shapes == expected:
                    continue
            raise CheckpointError(f"{what}: one has the shapes {shapes}")


def _silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x), without overflow."""
    result: np.ndarray = 0.5 * x * (1 + np.tanh(0.5 * x))
    return result
