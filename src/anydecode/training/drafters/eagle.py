"""EAGLE and EAGLE-2: one layer that reads a token's embedding and the target's last state, and
predicts the next such state.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv:2401.15077.
It is trained over unrolled draft steps, as in HASS (arXiv:2408.15766). Modules are named as in
released checkpoints (SafeAILab/EAGLE), which `models/draft_heads.py` opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner
from anydecode.training.drafters.unrolled import UnrolledAttention, following


class Eagle(Learner):
    """The drafter of EAGLE. It starts as the target's last layer; the embedding's part of the
    projection starts near 0. The target's whole head reads its states."""

    recipe = "eagle"
    default_depth = 3
    default_rate = 5e-4
    state_weight = 1.0

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.shape = layer_shape(target)
        self.fc = nn.Linear(2 * self.width, self.width)
        self.layers = nn.ModuleList([DraftLayer(self.shape, self.width, input_norm=False)])
        self.layer.copy(target.weights.layers[-1])
        with torch.no_grad():
            nn.init.normal_(self.fc.weight, std=0.02)
            self.fc.weight[:, self.width :].copy_(torch.eye(self.width))
            self.fc.bias.zero_()

    @property
    def layer(self) -> DraftLayer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """As in EAGLE-3, with the target's state after its final norm in the first step."""
        layer, attention = self.layer, UnrolledAttention(self.layer.self_attn)
        state, outputs = batch.final[:, :-1], []
        for tokens in following(batch.tokens, self.depth):
            x = self.fc(torch.cat([self.embed(tokens), state], -1))
            state = layer.add_mlp(x + attention.step(x))
            outputs.append(state)
        return Drafted(outputs, [torch.arange(batch.tokens.shape[1] - 1)] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "bias": True,
        }
        return Files(config, self.state_dict())
