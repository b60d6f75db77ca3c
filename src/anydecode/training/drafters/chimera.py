"""Chimera: a layer that fuses the last three tokens with the target's states of all tokens.

Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference
by Fusing all Tokens", arXiv:2402.15758. Layout: see `models/chimera.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner
from anydecode.training.drafters.unrolled import attend_rows


class Block(nn.Module):
    """x + silu(W x + b), with W starting at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + functional.silu(self.linear(x))
        return output


class Chimera(Learner):
    """A trigram encoder, a full context encoder that starts as the target's last layer, and
    `depth` resolvers that start as the sum of what they read. The encoder's outputs learn to be the
    target's states; no gradient comes from those that stand for them."""

    recipe = "chimera"
    key = "chimera"
    default_depth = 4
    default_rate = 1e-3
    decoder = "chimera:size={0},depth={0},width=1"
    state_weight = 1.0

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.shape, width = layer_shape(target), self.width
        self.trimlp = nn.Sequential(Block(3 * width), nn.Linear(3 * width, width, bias=False))
        self.fast_layer1 = nn.ModuleList([DraftLayer(self.shape, width)])
        self.layer.copy(target.weights.layers[-1])
        self.resolvers = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(depth)
        )
        for resolver in self.resolvers:
            assert isinstance(resolver, nn.Linear)
            resolver.weight.data.copy_(torch.eye(width).repeat(1, 2))

    @property
    def layer(self) -> DraftLayer:
        """The full context encoder."""
        layer = self.fast_layer1[0]
        assert isinstance(layer, DraftLayer)
        return layer

    @property
    def max_drafts(self) -> int:
        return self.depth

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t knows the target's states up to position t. In step i it reads the trigram that
        ends at t + 1 + i, and attends to these states, to its outputs before and to itself. Behind
        what the head reads, states have the output."""
        layer, rows = self.layer, batch.tokens.shape[1] - 1
        final, attention = batch.final[:, :-1], layer.self_attn
        trigrams, positions = self.trigrams(batch.tokens), torch.arange(rows)
        context = layer.input_layernorm(final)
        keys, values = attention.keys(context, positions), attention.values(context)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        states = []
        for step, resolver in enumerate(self.resolvers):
            x, places = trigrams[:, 1 + step : 1 + step + rows], positions + 1 + step
            y = layer.input_layernorm(x)
            pair = attention.keys(y, places), attention.values(y)
            q = attention.queries(y, places)
            output = layer.add_mlp(x + attention.output(attend_rows(q, keys, values, [*own, pair])))
            states.append(torch.cat([resolver(torch.cat([final, output], -1)), output], -1))
            y = layer.input_layernorm(output.detach())
            own.append((attention.keys(y, places), attention.values(y)))
        return Drafted(states, [positions] * self.depth)

    def trigrams(self, tokens: torch.Tensor) -> torch.Tensor:
        """The states of the trigrams that end with each token and behind the text, where its tokens
        are any: `[batch, length + depth, width]`."""
        tokens = torch.cat([tokens[:, :1].expand(-1, 2), tokens], 1)
        embedded = self.embed(functional.pad(tokens, (0, self.depth)))
        three = torch.cat([embedded[:, :-2], embedded[:, 1:-1], embedded[:, 2:]], -1)
        states: torch.Tensor = self.trimlp(three)
        return states

    def logits(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return super().logits(states[:, : self.width], previous)

    def extra_loss(
        self,
        states: torch.Tensor,
        final: torch.Tensor,
        previous: torch.Tensor,
        acceptance: torch.Tensor,
    ) -> torch.Tensor | None:
        return super().extra_loss(states[:, self.width :], final, previous, acceptance)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["ChimeraModel"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "chimera_num_heads": self.depth,
        }
        tensors = {**self.state_dict(), "token_map": torch.tensor(self.vocabulary)}
        if has_head:
            tensors["lm_head.weight"] = self.head
        return Files(config, tensors)
