"""Blocks of drafted tokens in training: where they begin, and their attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, Projections

#: One block is trained per this number of tokens of an answer, at random places.
TOKENS_PER_BLOCK = 4


class Blocks(NamedTuple):
    """Slots of blocks, `rows` in all.

    Attributes:
        inputs: What the attention reads of them, `[batch, rows, numbers]`.
        positions: int64 `[batch, rows]`.
        visible: bool `[slots, slots]`: to which slots of a block each of them attends.
    """

    inputs: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor


def choose_starts(batch: DraftBatch, random: torch.Generator) -> torch.Tensor:
    """The positions before the first tokens of blocks, `[batch, blocks]`: random ones of each text,
    behind which the answer goes on; then, for texts with fewer blocks than others, one behind which
    nothing is trained."""
    chosen = []
    for row in batch.is_answer:
        found = torch.nonzero(row[1:])[:, 0]
        count = -(-len(found) // TOKENS_PER_BLOCK)
        chosen.append(found[torch.randperm(len(found), generator=random)[:count]])
    none = batch.tokens.shape[1] - 2
    return nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=none)


def attend_blocks(
    projections: Projections,
    blocks: Blocks,
    context: torch.Tensor,
    places: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """The output of an attention of blocks, `[batch, rows, width]`.

    Args:
        projections: Its matrices.
        blocks: The blocks, which attend to a context and to themselves.
        context: What the keys and values of the context read, `[batch, length, numbers]`.
        places: The positions of the context, `[length]`.
        visible: Whether a slot attends to a row of the context, `[batch, 1, rows, length]`.
    """
    x, positions, own = blocks
    length, slots, least = context.shape[1], len(own), float("-inf")

    def split(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*rows.shape[:2], -1, slots, rows.shape[-1])

    q, keys = projections.queries(x, positions), projections.keys(x, positions)
    values, others = projections.values(x), projections.keys(context, places)
    far = (q @ others.transpose(-1, -2)).masked_fill(~visible, least)
    near = (split(q) @ split(keys).transpose(-1, -2)).masked_fill(~own, least).flatten(2, 3)
    weights = torch.softmax(torch.cat([far, near], -1).float(), -1).to(values.dtype)
    mixed = weights[..., :length] @ projections.values(context)
    mixed = mixed + (split(weights[..., length:]) @ split(values)).flatten(2, 3)
    return projections.output(mixed)


def run_masks(
    layer: DraftLayer,
    context: torch.Tensor,
    chosen: torch.Tensor,
    masks: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The output of a layer for blocks of mask tokens behind rows of a text, which attend to the
    rows up to that one and to the mask tokens before: `[batch, blocks, slots, width]`.

    Args:
        layer: The layer.
        context: What its attention reads of the text's rows, `[batch, length, numbers]`.
        chosen: The rows that blocks follow, `[batch, blocks]`.
        masks: What its attention reads of a block, `[slots, numbers]`.
        state: What its output is added to, `[slots, width]`.
    """
    (batch, blocks), slots, places = chosen.shape, len(masks), torch.arange(context.shape[1])
    inputs = masks.repeat(blocks, 1).expand(batch, -1, -1)
    positions = (chosen[:, :, None] + 2 + torch.arange(slots)).flatten(1)
    causal = torch.ones(slots, slots, dtype=torch.bool).tril()
    visible = places <= chosen.repeat_interleave(slots, 1)[:, :, None]
    rows = Blocks(inputs, positions, causal)
    mixed = attend_blocks(layer.self_attn, rows, context, places + 1, visible[:, None])
    x = state.repeat(blocks, 1) + mixed
    return layer.add_mlp(x).view(batch, blocks, slots, -1)


def speculators_config(
    kind: str, architecture: str, target: dict[str, Any], layers: dict[str, Any], depth: int
) -> dict[str, Any]:
    """What all configs in the layout of speculators have.

    Args:
        kind: The kind of drafter.
        architecture: The name of its class.
        target: The target's config.
        layers: The config of the drafter's layers.
        depth: Number of tokens that are drafted.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": target.get("architectures")},
        },
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **layers},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
