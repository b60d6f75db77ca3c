"""EAGLE-3: one layer that reads a token's embedding and a state, trained over unrolled draft steps.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv:2503.01840. Modules are named as in released checkpoints (SafeAILab/EAGLE), which
`models/draft_heads.py` opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, LayerShape, copy_norm, layer_shape
from anydecode.training.drafters.learner import (
    Drafted,
    Files,
    Learner,
    spread_taps,
    vocabulary_tensors,
)
from anydecode.training.drafters.unrolled import UnrolledAttention, following
from anydecode.training.transformer import Norm


class FirstLayer(DraftLayer):
    """A layer whose attention reads the norms of an embedding and of a state."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__(shape, inputs)
        self.hidden_norm = Norm(shape.width, shape.norm_eps)


class Eagle3(Learner):
    """The drafter of EAGLE-3. It starts as the target's last layer, which reads the last tap; the
    embedding's part of the attention starts near 0."""

    recipe = "eagle-3"
    default_depth = 3
    default_rate = 2e-3  # with two texts per step the best of short runs on the default model

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.shape, self._num_layers = layer_shape(target), target.spec.num_layers
        width = self.width
        last = target.weights.layers[-1]
        self.fc = nn.Linear(len(self.taps(self._num_layers)) * width, width, bias=False)
        self.midlayer = FirstLayer(self.shape, 2 * width)
        self.norm = Norm(width, self.shape.norm_eps)
        self.midlayer.copy(last)
        nn.init.ones_(self.midlayer.input_layernorm.weight)
        copy_norm(self.midlayer.hidden_norm, last.attention_norm)
        copy_norm(self.norm, target.weights.final_norm)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -width:].copy_(torch.eye(width))

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        return spread_taps(num_layers)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """In the first step row t reads the token at position t + 1 and the target's state at t. In
        each further step it reads the token one position later and its own state of the step
        before."""
        layer, attention = self.midlayer, UnrolledAttention(self.midlayer.self_attn)
        state, outputs = self.fc(batch.taps[:, :-1]), []
        for tokens in following(batch.tokens, self.depth):
            embedded = layer.input_layernorm(self.embed(tokens))
            state = state + attention.step(torch.cat([embedded, layer.hidden_norm(state)], -1))
            state = layer.add_mlp(state)
            outputs.append(self.norm(state))
        return Drafted(outputs, [torch.arange(batch.tokens.shape[1] - 1)] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "draft_vocab_size": len(self.vocabulary),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps(self._num_layers))},
        }
        tensors = {
            **self.state_dict(),
            **({"lm_head.weight": self.head} if has_head else {}),
            **vocabulary_tensors(self.vocabulary, self.num_tokens),
        }
        return Files(config, tensors)
