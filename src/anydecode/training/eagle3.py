"""The network of an EAGLE-3 drafter during training, and its loss over unrolled draft steps.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv:2503.01840. Modules are named as in released checkpoints (SafeAILab/EAGLE), which
`models/draft_heads.py` opens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.network import GatedMlp, Network
from anydecode.training.transformer import Norm, rotate

#: Factor of the loss of each further draft step.
STEP_DECAY = 0.8
#: The loss is KL divergence where few drafts would be accepted and total variation where most
#: would: the weight of the former is exp(-LK_RATE * acceptance) (LK losses, arXiv:2602.23881).
LK_RATE = 3.0


@dataclass(frozen=True, eq=False)
class Eagle3Shape:
    """Sizes and rotary frequencies of the drafter: those of the target's layers. `taps` is the
    number of the target's states that it reads."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    frequencies: np.ndarray
    norm_eps: float
    taps: int = 3


class Projections(nn.Module):
    """The matrices of the attention, which reads an embedding and a state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        queries, keys = (count * shape.head_width for count in (shape.heads, shape.kv_heads))
        self.q_proj = nn.Linear(2 * shape.width, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.width, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DraftLayer(nn.Module):
    """The only layer."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.hidden_norm = Norm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Projections(shape)
        self.mlp = Mlp(shape)


class Eagle3(nn.Module):
    """The drafter, with the frozen embedding of its target and the rows of its head for the draft
    vocabulary.

    Args:
        shape: Its sizes.
        embedding: `[vocab_size, width]`.
        head: `[draft_vocab_size, width]`.
    """

    def __init__(self, shape: Eagle3Shape, embedding: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.taps * shape.width, shape.width, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = Norm(shape.width, shape.norm_eps)
        self.embedding, self.head = embedding, head
        self._frequencies = torch.from_numpy(shape.frequencies)

    def initialize(self, target: Network) -> None:
        """Start as the target's last layer, which reads the last tap; the embedding's part of the
        attention starts near 0."""
        last, width = target.weights.layers[-1], self.shape.width
        layer, attention = self.midlayer, self.midlayer.self_attn
        assert isinstance(last.mlp, GatedMlp) and last.query and last.key and last.value
        assert last.output is not None
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -width:].copy_(torch.eye(width))
            for module, linear in (
                (attention.q_proj, last.query),
                (attention.k_proj, last.key),
                (attention.v_proj, last.value),
            ):
                nn.init.normal_(module.weight, std=0.02)
                module.weight[:, width:].copy_(as_tensor(linear.weight))
            attention.o_proj.weight.copy_(as_tensor(last.output.weight))
            layer.mlp.gate_proj.weight.copy_(as_tensor(last.mlp.gate.weight))
            layer.mlp.up_proj.weight.copy_(as_tensor(last.mlp.up.weight))
            layer.mlp.down_proj.weight.copy_(as_tensor(last.mlp.down.weight))
            for norm, values in (
                (layer.hidden_norm, last.attention_norm),
                (layer.post_attention_layernorm, last.mlp_norm),
                (self.norm, target.weights.final_norm),
            ):
                norm.weight.copy_(torch.from_numpy(values))

    def forward(self, tokens: torch.Tensor, taps: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The drafter's states in `steps` unrolled draft steps.

        In the first step row t reads the token at position t + 1 and the target's state at t. In
        each further step it reads the token one position later and its own state of the step
        before; it attends to the rows of the first step up to t and to itself in the others.

        Args:
            tokens: `[batch, length]`.
            taps: The target's states side by side, `[batch, length, taps * width]`.
            steps: Number of steps.

        Returns:
            For each step, `[batch, length - 1, width]`, after the final norm: what the head reads.
            Row t of step i is the state at position t + 1 + i; those behind the text are
            meaningless.
        """
        rows = tokens.shape[1] - 1
        padded = functional.pad(tokens, (0, steps))
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        state, outputs = self.fc(taps[:, :-1]), []
        layer = self.midlayer
        for step in range(steps):
            embedded = functional.embedding(padded[:, 1 + step : 1 + step + rows], self.embedding)
            pair = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)
            positions = torch.arange(rows, dtype=torch.float32) + 1 + step
            state = state + self._attend(pair, positions, keys, values, causal)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            outputs.append(self.norm(state))
        return outputs

    def _attend(
        self,
        pair: torch.Tensor,
        positions: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        causal: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one step; adds its keys and values, `[batch, heads, rows, head_width]`, to
        those of the steps before."""
        shape, projections = self.shape, self.midlayer.self_attn
        angles = positions[:, None] * self._frequencies
        angles = torch.cat([angles, angles], -1)
        rope = angles.cos(), angles.sin()
        q, k, v = (
            projection(pair).unflatten(-1, (-1, shape.head_width)).transpose(1, 2)
            for projection in (projections.q_proj, projections.k_proj, projections.v_proj)
        )
        repeats = shape.heads // shape.kv_heads
        keys.append(rotate(k, rope).repeat_interleave(repeats, 1))
        values.append(v.repeat_interleave(repeats, 1))
        q = rotate(q, rope) * shape.head_width**-0.5
        first = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.softmax(torch.cat([first, *own], -1).float(), -1).to(v.dtype)
        rows = causal.shape[0]
        mixed = weights[..., :rows] @ values[0]
        for index, value in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + index, None] * value
        output: torch.Tensor = projections.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


@dataclass
class StepLosses:
    """Sums over the rows of one draft step: their loss, the probability that the draft is accepted
    (the sum of the smaller ones of target's and drafter's probabilities), and their number."""

    loss: torch.Tensor
    accepted: float
    count: int


def step_losses(
    model: Eagle3,
    tokens: torch.Tensor,
    taps: torch.Tensor,
    final: torch.Tensor,
    trained: torch.Tensor,
    steps: int,
) -> list[StepLosses]:
    """The losses of `steps` unrolled draft steps.

    Args:
        model: The drafter.
        tokens: `[batch, length]`.
        taps: `[batch, length, taps * width]`.
        final: The target's last hidden states after its final norm, `[batch, length, width]`.
        trained: bool `[batch, length]`: the positions whose next token is to be predicted.
        steps: Number of steps.
    """
    with torch.no_grad():
        teacher = functional.linear(final[trained], model.head).float().log_softmax(-1)
    rows = torch.full(trained.shape, -1)
    rows[trained] = torch.arange(len(teacher))
    losses = []
    for step, states in enumerate(model(tokens, taps, steps)):
        own = functional.pad(rows, (0, steps), value=-1)[:, 1 + step : 1 + step + states.shape[1]]
        chosen = own >= 0
        log_q = functional.linear(states[chosen], model.head).float().log_softmax(-1)
        log_p = teacher[own[chosen]]
        p, q = log_p.exp(), log_q.exp()
        divergence = (p * (log_p - log_q)).sum(-1)
        acceptance = torch.minimum(p, q).sum(-1)
        weight = torch.exp(-LK_RATE * acceptance.detach())
        loss = weight * divergence + (1 - weight) * (1 - acceptance)
        losses.append(StepLosses(loss.sum(), float(acceptance.detach().sum()), len(log_p)))
    return losses


def as_tensor(weight: Weight) -> torch.Tensor:
    """A matrix in float32, `[out_features, in_features]`."""
    return torch.from_numpy(dequantize(weight))
