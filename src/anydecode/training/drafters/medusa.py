"""Medusa: heads on the target's last state, each of which predicts one position.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv:2401.10774. The heads share the rows of the target's head. Layout: vLLM's, which
`models/medusa.py` opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.learner import Drafted, Files, Learner


class Medusa(Learner):
    """`depth` heads of one block x + silu(W x + b), with W and b starting at 0."""

    recipe = "medusa"
    key = "medusa"
    default_depth = 4
    default_rate = 1e-3

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.blocks = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(depth))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    @property
    def max_drafts(self) -> int:
        return self.depth

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t reads the target's state at position t."""
        state = batch.final[:, :-1]
        states = [state + functional.silu(block(state)) for block in self.blocks]
        return Drafted(states, [torch.arange(state.shape[1])] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.width,
            "vocab_size": self.num_tokens,
            "truncated_vocab_size": len(self.vocabulary),
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "medusa_num_heads": self.depth,
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "torch_dtype": "bfloat16",
        }
        tensors = {"token_map": torch.tensor(self.vocabulary)}
        for name, tensor in self.state_dict().items():
            _, head, part = name.split(".")
            tensors[f"blocks.{head}.layers.0.{part}"] = tensor
        if has_head:
            tensors["lm_heads.0.weight"] = self.head
        return Files(config, tensors)
