"""Falcon: a layer behind the cells of an LSTM, whose rows see each other in blocks and predict a
block ahead.

Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree", arXiv:2412.12639. Modules are named
as in the code of its authors (Bestpay-inc/Falcon), whose files `models/draft_heads.py` opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.blocks import Blocks, attend_blocks
from anydecode.training.drafters.layers import DraftLayer, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner

#: Tokens of a block.
BLOCK = 2
#: The share of the wrong predictions whose truth is shown falls from the sum of both to the second.
_SHARE, _LAST_SHARE = 0.35, 0.1


class Falcon(Learner):
    """The drafter of Falcon with blocks of two tokens. Its layer starts as the target's last one.

    In coupled sequential glancing distillation, a first pass counts the wrong predictions.
    A part of them, random first rows of blocks, then reads what it is to predict, state and token,
    which the other rows of its block see. Behind the blocks of a text follow further ones that read
    the drafter's own states, as its drafts do.
    """

    recipe = "falcon"
    key = "falcon"
    default_depth = 4
    default_rate = 5e-4
    decoder = "falcon:size={0},blocks={0},tree=false,threshold=0"
    state_weight = 1.0

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        if depth % BLOCK:
            raise UnsupportedCombinationError(
                f"falcon drafts blocks of {BLOCK} tokens; the depth {depth} is no multiple"
            )
        self.shape = layer_shape(target)
        self.lstm = nn.LSTM(2 * self.width, self.width, num_layers=2)
        self.layers = nn.ModuleList([DraftLayer(self.shape, self.width, input_norm=False)])
        self.layer.copy(target.weights.layers[-1])

    @property
    def layer(self) -> DraftLayer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def cells(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The inputs of the layer. As in the code of its authors the rows are a batch of the LSTM,
        so that its cells start from zero in each of them."""
        rows = torch.cat([self.embed(tokens), states], -1)
        # Processors without AVX-512 have no LSTM in bfloat16.
        with torch.autocast(rows.device.type, enabled=False):
            output: torch.Tensor = self.lstm(rows.float().reshape(1, -1, rows.shape[-1]))[0]
        return output.view(*rows.shape[:-1], -1)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Blocks cover the rows of a text from a random one of its first on, as far as it has a
        token for each of their predictions. They attend to the rows before them and to
        themselves."""
        offset = int(torch.randint(BLOCK, (), generator=random))
        firsts = torch.arange(offset, batch.tokens.shape[1] - 2 * BLOCK + 1, BLOCK)
        tokens = functional.pad(batch.tokens, (0, self.depth))
        context = self.cells(batch.tokens[:, 1:], batch.final[:, :-1])
        own = firsts[:, None] + torch.arange(BLOCK)
        first = tokens[:, own + 1], batch.final[:, own]
        if self.training:
            with torch.no_grad():
                first = self.glanced(batch, context, firsts, random)
        inputs, outputs = self.cells(*first), list[torch.Tensor]()
        for step in range(0, self.depth, BLOCK):
            if step:
                further = self.cells(tokens[:, own + 1 + step], outputs[-1])
                inputs = torch.cat([inputs, further], 2)
            outputs.append(self.run_blocks(inputs, context, firsts)[:, :, -BLOCK:])
        states = [state for output in outputs for state in output.unbind(2)]
        return Drafted(states, [firsts + BLOCK - 1] * self.depth)

    def glanced(
        self,
        batch: DraftBatch,
        context: torch.Tensor,
        firsts: torch.Tensor,
        random: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and states of blocks, some of which are the truth that the row predicts."""
        own = firsts[:, None] + torch.arange(BLOCK)
        tokens, states = batch.tokens[:, own + 1], batch.final[:, own].clone()
        found = self.run_blocks(self.cells(tokens, states), context, firsts)
        truth, is_answer = batch.final[:, own + BLOCK], batch.is_answer[:, own + BLOCK]
        is_wrong = self.best_tokens(found) != self.best_tokens(truth)
        share = _SHARE * (1 - self.progress) + _LAST_SHARE
        count = int(share * int((is_wrong & is_answer).sum()))
        places = torch.nonzero(is_answer[..., 0])
        texts, blocks = places[torch.randperm(len(places), generator=random)[:count]].unbind(-1)
        tokens[texts, blocks, 0] = batch.tokens[texts, firsts[blocks] + BLOCK + 1]
        states[texts, blocks, 0] = truth[texts, blocks, 0]
        return tokens, states

    def best_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The rows of the head with the largest logits."""
        return functional.linear(states, self.head).argmax(-1)

    def run_blocks(
        self, inputs: torch.Tensor, context: torch.Tensor, firsts: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output for blocks and those that follow each of them, `[batch, blocks, slots,
        width]` as `inputs`."""
        slots, layer = inputs.shape[2], self.layer
        block = torch.arange(slots) // BLOCK
        positions = (firsts[:, None] + 1 + torch.arange(slots)).flatten()
        rows = Blocks(inputs.flatten(1, 2), positions, block[:, None] >= block)
        places = torch.arange(context.shape[1])
        visible = places < firsts.repeat_interleave(slots)[:, None]
        mixed = attend_blocks(layer.self_attn, rows, context, places + 1, visible)
        return layer.add_mlp(rows.inputs + mixed).view_as(inputs)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "bias": True,
            "k_mask": BLOCK,
        }
        return Files(config, self.state_dict())
