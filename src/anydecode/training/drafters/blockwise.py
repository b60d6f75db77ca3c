"""The proposal heads of blockwise parallel decoding: one ReLU layer on the target's last state.

Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models", arXiv:1811.03115, with a
frozen target. Layout: see `models/blockwise.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.learner import Drafted, Files, Learner


class Layer(nn.Module):
    """The layer of `heads` heads, with as many hidden units as outputs; at first it adds 0."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, heads * width)
        self.output = nn.Linear(heads * width, heads * width)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)


class Blockwise(Learner):
    """`depth` heads, which share the rows of the target's head."""

    recipe = "blockwise"
    key = "blockwise"
    default_depth = 4
    default_rate = 1e-3
    decoder = "blockwise:size={0}"

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.blockwise = Layer(self.width, depth)

    @property
    def max_drafts(self) -> int:
        return self.depth

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t reads the target's state at position t. All heads are trained in each step (the
        paper: one of them, drawn at random)."""
        state = batch.final[:, :-1]
        added = self.blockwise.output(functional.relu(self.blockwise.hidden(state)))
        states = [state + part for part in added.chunk(self.depth, -1)]
        return Drafted(states, [torch.arange(state.shape[1])] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "blockwise_num_heads": self.depth,
            "blockwise_hidden_size": self.blockwise.hidden.out_features,
            "hidden_size": self.width,
            "vocab_size": self.num_tokens,
            "torch_dtype": "bfloat16",
        }
        tensors = {**self.state_dict(), "token_map": torch.tensor(self.vocabulary)}
        if has_head:
            tensors["lm_head.weight"] = self.head
        return Files(config, tensors)
