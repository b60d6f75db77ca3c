"""P-EAGLE: the drafter of EAGLE-3, which predicts further tokens from mask tokens in the same pass.

arXiv:2602.01469. Layout: that of speculators, which `models/draft_heads.py` opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.blocks import choose_starts, run_masks, speculators_config
from anydecode.training.drafters.eagle3 import Eagle3
from anydecode.training.drafters.learner import Drafted, Files
from anydecode.training.drafters.unrolled import UnrolledAttention


class PEagle(Eagle3):
    """EAGLE-3's layer. Each mask token reads the same learned state in place of the target's."""

    recipe = "p-eagle"
    key = "dflash"
    default_depth = 4
    decoder = "dflash:size={0},threshold=0"

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        width = len(self.taps(target.spec.num_layers)) * self.width
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor(mask))  # in the state: data may be added

    @property
    def max_drafts(self) -> int:
        return self.depth

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """The first step is EAGLE-3's. Behind random rows of it stand blocks of mask tokens, which
        attend to the rows up to that one and to the mask tokens before."""
        layer, places = self.midlayer, torch.arange(batch.tokens.shape[1] - 1)
        first = self.fc(batch.taps[:, :-1])
        pairs = self._pairs(self.embed(batch.tokens[:, 1:]), first)
        x = first + UnrolledAttention(layer.self_attn).step(pairs)
        states, starts = [self.norm(layer.add_mlp(x))], [places]
        slots = self.depth - 1
        if not slots:
            return Drafted(states, starts)
        chosen = choose_starts(batch, random)
        state = self.fc(self.mask_hidden[0]).expand(slots, -1)
        masks = self._pairs(self.embed(self.mask.expand(slots)), state)
        drafted = self.norm(run_masks(layer, pairs, chosen, masks, state))
        return Drafted([*states, *drafted.unbind(2)], [*starts, *[chosen] * slots])

    def _pairs(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        plain, tensors = super().files(target, has_head)
        layers = {**self.shape.config(target, 1), "vocab_size": self.num_tokens}
        config = {
            **speculators_config("peagle", "PEagleSpeculator", target, layers, self.depth),
            "draft_vocab_size": len(self.vocabulary),
            **plain["eagle_config"],
            "mask_token_id": int(self.mask),
            "norm_before_residual": False,
        }
        renamed = {name.replace("midlayer", "layers.0"): x for name, x in tensors.items()}
        del renamed["mask"]
        return Files(config, renamed)
