"""The block of Mamba in front of an exit router (DYNAMAX, arXiv:2504.20922)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from anydecode.models.mamba_blocks import PARTS, MambaBlocks
from anydecode.training.transformer import Norm

#: Numbers that a channel remembers, and inputs of its convolution.
STATE_SIZE, WINDOW = 16, 4
#: The range in which the steps of new blocks start.
MIN_STEP, MAX_STEP = 1e-3, 1e-1


class MambaBlock(nn.Module):
    """See `MambaBlocks`: states of texts, `[texts, length, size]`, plus what the block adds.

    A new block adds nothing.
    """

    def __init__(self, size: int, width: int, eps: float) -> None:
        super().__init__()
        rank = max(1, width // 16)
        self.norm = Norm(size, eps)
        self.in_proj = nn.Linear(size, 2 * width, bias=False)
        self.conv = nn.Parameter(torch.empty(width, WINDOW).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.zeros(width))
        self.x_proj = nn.Linear(width, rank + 2 * STATE_SIZE, bias=False)
        self.dt_proj = nn.Linear(rank, width, bias=False)
        steps = torch.exp(torch.empty(width).uniform_(math.log(MIN_STEP), math.log(MAX_STEP)))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(steps)))
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, STATE_SIZE + 1)).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, size, bias=False)
        nn.init.zeros_(self.out_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        padded = functional.pad(u.mT, (WINDOW - 1, 0))
        conv = functional.conv1d(padded, self.conv[:, None], self.conv_bias, groups=u.shape[-1])
        u = functional.silu(conv.mT)
        rank = self.dt_proj.in_features
        low, into, out_of = self.x_proj(u).split([rank, STATE_SIZE, STATE_SIZE], -1)
        steps = functional.softplus(self.dt_proj(low) + self.dt_bias)[..., None]
        decays = torch.exp(-torch.exp(self.a_log) * steps)
        inputs = steps * u[..., None] * into[..., None, :]
        state, states = torch.zeros_like(inputs[:, 0]), []
        for decay, one in zip(decays.unbind(1), inputs.unbind(1), strict=True):
            state = decay * state + one
            states.append(state)
        read = (torch.stack(states, 1) * out_of[..., None, :]).sum(-1) + self.skip * u
        result: torch.Tensor = x + self.out_proj(read * functional.silu(gate))
        return result


def mamba_blocks(modules: dict[int, nn.Module]) -> MambaBlocks:
    """`MambaBlock` modules, by exit, in the engine's format."""
    parts: dict[str, dict[int, object]] = {name: {} for name in PARTS}
    for exit, block in modules.items():
        for name, weight in block.named_parameters():
            parts[name.removesuffix(".weight")][exit] = weight.detach().numpy().copy()
    return MambaBlocks(**parts)  # type: ignore[arg-type]
