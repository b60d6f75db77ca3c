"""ParallelSpec: the drafter of EAGLE, which predicts further tokens from mask tokens in the same
pass.

Xiao et al., "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", arXiv:2410.05589.
Layout: see `models/draft_heads.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.blocks import choose_starts, run_masks
from anydecode.training.drafters.eagle import Eagle
from anydecode.training.drafters.learner import Drafted, Files
from anydecode.training.drafters.unrolled import UnrolledAttention


class ParallelSpec(Eagle):
    """EAGLE's layer. Each mask token reads a learned state of its own in place of the target's.
    Blocks of mask tokens behind many rows of a text are trained together (group-wise training)."""

    recipe = "parallelspec"
    key = "parallelspec"
    default_depth = 4
    decoder = "dflash:size={0},threshold=0"

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.mask_states = nn.Parameter(0.02 * torch.randn(depth - 1, self.width))
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor(mask))  # in the state: data may be added

    @property
    def max_drafts(self) -> int:
        return self.depth

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """The first step is EAGLE's. Behind random rows of it stand blocks of mask tokens, which
        attend to the rows up to that one and to the mask tokens before."""
        layer, slots = self.layer, self.depth - 1
        rows = self.fc(torch.cat([self.embed(batch.tokens[:, 1:]), batch.final[:, :-1]], -1))
        states = [layer.add_mlp(rows + UnrolledAttention(layer.self_attn).step(rows))]
        starts = [torch.arange(rows.shape[1])]
        if not slots:
            return Drafted(states, starts)
        chosen = choose_starts(batch, random)
        embedded = self.embed(self.mask.expand(slots))
        masks = self.fc(torch.cat([embedded, self.mask_states], -1))
        drafted = run_masks(layer, rows, chosen, masks, masks)
        return Drafted([*states, *drafted.unbind(2)], [*starts, *[chosen] * slots])

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config, tensors = super().files(target, has_head)
        kept = {name: tensor for name, tensor in tensors.items() if name != "mask"}
        return Files({**config, "mask_token_id": int(self.mask)}, kept)
