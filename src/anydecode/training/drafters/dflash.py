"""DFlash: layers that predict a block of tokens in one pass, from the target's states of the text.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036. Layout:
that of speculators, which `models/block_drafters.py` opens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.blocks import (
    Blocks,
    attend_blocks,
    choose_starts,
    speculators_config,
)
from anydecode.training.drafters.layers import DraftLayer, copy_norm, layer_shape
from anydecode.training.drafters.learner import (
    Drafted,
    Files,
    Learner,
    spread_taps,
    vocabulary_tensors,
)
from anydecode.training.transformer import Norm


class DFlash(Learner):
    """Two layers, which start as the target's last two. `mask` is the token of the slots behind the
    first one, which has the last token of the text.

    Attributes:
        from_anchor: Whether the first slot predicts too.
        kind: What speculators calls such drafters.
    """

    recipe = "dflash"
    key = "dflash"
    default_depth = 5
    default_rate = 5e-4
    decoder = "dflash:size={0},threshold=0"
    num_layers: ClassVar[int] = 2
    from_anchor: ClassVar[bool] = False
    kind: ClassVar[tuple[str, str]] = ("dflash", "DFlashSpeculator")

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.shape, self._depth = layer_shape(target), target.spec.num_layers
        width, eps = self.width, self.shape.norm_eps
        taps, last = len(self.taps(self._depth)), target.weights.layers[-self.num_layers :]
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(DraftLayer(self.shape, width) for _ in last)
        for layer, weights in zip(self._layers, last, strict=True):
            layer.copy(weights)
        copy_norm(self.hidden_norm, last[0].attention_norm)
        self.norm = Norm(width, eps)
        copy_norm(self.norm, target.weights.final_norm)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -width:].copy_(torch.eye(width))
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor(mask))  # in the state: data may be added

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        return spread_taps(num_layers)

    @property
    def max_drafts(self) -> int:
        return self.depth

    @property
    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def _num_slots(self) -> int:
        return self.depth + (not self.from_anchor)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Blocks behind random positions of each text. They attend to the context before their
        first slot and to themselves."""
        starts = choose_starts(batch, random)
        anchors, slots = starts + 1, self._num_slots
        texts = torch.arange(len(starts))[:, None]
        tokens = self.mask.expand(*starts.shape, slots).clone()
        tokens[:, :, 0] = batch.tokens[texts, anchors]
        x = self.embed(tokens.flatten(1))
        positions = (anchors[:, :, None] + torch.arange(slots)).flatten(1)
        context = self.hidden_norm(self.fc(batch.taps))
        places = torch.arange(context.shape[1])
        visible = places < anchors.repeat_interleave(slots, 1)[:, :, None]
        near = torch.ones(slots, slots, dtype=torch.bool)
        for layer in self._layers:
            blocks = Blocks(layer.input_layernorm(x), positions, near)
            x = x + attend_blocks(layer.self_attn, blocks, context, places, visible[:, None])
            x = layer.add_mlp(x)
        states = self.norm(x).view(len(x), -1, slots, self.width)[:, :, slots - self.depth :]
        return Drafted(list(states.unbind(2)), [starts] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        kind, architecture = self.kind
        layers = {
            **self.shape.config(target, self.num_layers),
            "vocab_size": self.num_tokens,
        }
        config = {
            **speculators_config(kind, architecture, target, layers, self.depth),
            "draft_vocab_size": len(self.vocabulary),
            "aux_hidden_state_layer_ids": list(self.taps(self._depth)),
            "mask_token_id": int(self.mask),
            "block_size": self._num_slots,
            "sample_from_anchor": self.from_anchor,
        }
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name != "mask"}
        if has_head:
            tensors["lm_head.weight"] = self.head
        return Files(config, {**tensors, **vocabulary_tensors(self.vocabulary, self.num_tokens)})
