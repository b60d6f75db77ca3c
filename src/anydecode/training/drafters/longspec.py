"""The draft layer of LongSpec, which attends to the keys and values of the target's last layer.

Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", arXiv:2502.17421. Two things let short texts prepare it for long ones and for the
drafts of one round: positions behind the first few are shifted by a random offset (anchor-offset
indices), and a row sees the target's keys and values up to a random number of positions before its
own (flash noisy training). Layout: that of `models/longspec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import LayerWeights, Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import (
    DraftLayer,
    LayerShape,
    Projections,
    as_tensor,
    copy_norm,
    layer_shape,
)
from anydecode.training.drafters.learner import Drafted, Files, Learner, vocabulary_tensors
from anydecode.training.transformer import Norm

#: Positions that a row attends to of the layer's own keys and values, itself included.
WINDOW = 512
#: Maximum number of first positions that stay where they are (attention sinks).
MAX_SINKS = 4
#: The largest offset of a position, and how far it stays below the model's number of positions.
MAX_OFFSET, MARGIN = 30_000, 1000
#: Texts of more tokens have their own positions.
MAX_SHIFTED = 1200
#: The largest number of positions between a row and the last key of the target that it sees.
MAX_LAG = 5


class Fixed(nn.Module):
    """A function of a weight of the target, which is not trained and not in the state."""

    def __init__(self, function: Callable[..., torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self._function = function
        self.weight: torch.Tensor
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x, weight=self.weight)


class CrossAttention(Projections):
    """Queries and output of an attention to the keys and values of a layer of the target, which are
    not trained."""

    def __init__(self, shape: LayerShape, layer: LayerWeights) -> None:
        super().__init__(shape, shape.width)
        assert layer.key is not None and layer.value is not None
        del self.k_proj, self.v_proj
        self.k_proj: Any = Fixed(functional.linear, as_tensor(layer.key.weight))
        self.v_proj: Any = Fixed(functional.linear, as_tensor(layer.value.weight))


class LongSpec(Learner):
    """A layer whose parts start as those of the target's last one. One step is trained, in which
    the rows are at random places of a draft."""

    recipe = "longspec"
    key = "longspec"
    default_depth = 1
    default_rate = 5e-4
    decoder = "longspec:width=1,depth={0}"

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        if depth != 1:
            raise UnsupportedCombinationError(
                f"longspec is trained for depth=1, not {depth}: its rows are at random places of a"
                " draft"
            )
        super().__init__(target, vocabulary, depth, mask)
        last = target.weights.layers[-1]
        if last.attention_norm is None:
            raise UnsupportedCombinationError("longspec needs a target with norms before attention")
        self.shape, self.max_positions = layer_shape(target), target.spec.max_positions
        eps = self.shape.norm_eps
        # A layer of Llama, whose attention and norms both attentions start with.
        layer = DraftLayer(self.shape, self.width)
        layer.copy(last)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.cross_attn = CrossAttention(self.shape, last)
        self.input_layernorm = layer.input_layernorm
        self.cross_layernorm, self.norm = Norm(self.width, eps), Norm(self.width, eps)
        self.post_attention_layernorm = layer.post_attention_layernorm
        copy_norm(self.cross_layernorm, last.attention_norm)
        copy_norm(self.norm, target.weights.final_norm)
        self._state_norm = Fixed(
            partial(functional.rms_norm, normalized_shape=(self.width,), eps=eps),
            torch.from_numpy(last.attention_norm).float(),
        )

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        """The state before the last layer."""
        if num_layers < 2:
            raise UnsupportedCombinationError(
                f"longspec reads the state before the last of at least 2 layers, not {num_layers}"
            )
        return (num_layers - 1,)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t reads the token at position t and predicts that at t + 1."""
        x, length = self.embed(batch.tokens), batch.tokens.shape[1]
        positions = anchor_offset(length, self.max_positions, random)
        lag = choose_lag(random)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        normed = self.input_layernorm(x)
        near = (distance >= 0) & (distance < WINDOW)
        x = x + attend(self.self_attn, normed, normed, positions, near)
        context, normed = self._state_norm(batch.taps), self.cross_layernorm(x)
        x = x + attend(self.cross_attn, normed, context, positions, distance >= lag)
        states = self.norm(x + self.mlp(self.post_attention_layernorm(x)))
        return Drafted([states], [torch.arange(length) - 1])

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["LongSpecDrafter"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "draft_vocab_size": len(self.vocabulary),
            "sliding_window": WINDOW,
        }
        tensors = {**self.state_dict(), **vocabulary_tensors(self.vocabulary, self.num_tokens)}
        if has_head:
            tensors["lm_head.weight"] = self.head
        return Files(config, tensors)


def anchor_offset(length: int, max_positions: int, random: torch.Generator) -> torch.Tensor:
    """The positions of a text's tokens, int64 `[length]`: those of the first few are their own,
    those behind are shifted by one random offset."""
    positions = torch.arange(length)
    room = min(MAX_OFFSET, max_positions - MARGIN) - length
    if length > MAX_SHIFTED or room <= 0:
        return positions
    sinks = int(torch.randint(0, MAX_SINKS + 1, (), generator=random))
    positions[sinks:] += torch.randint(0, room, (), generator=random)
    return positions


def choose_lag(random: torch.Generator) -> int:
    """How many positions before a row the last key of the target is that it sees."""
    return int(torch.randint(1, MAX_LAG + 1, (), generator=random))


def attend(
    attention: Projections,
    x: torch.Tensor,
    context: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """The output of an attention of rows `x` to those of `context`, both `[batch, length, width]`;
    0 for rows that see none. `visible` is bool `[length, length]`."""
    scores = attention.queries(x, positions) @ attention.keys(context, positions).transpose(-1, -2)
    scores = scores.float().masked_fill(~visible, float("-inf"))
    sees_any = visible.any(-1)[:, None]
    weights = torch.softmax(scores.masked_fill(~sees_any, 0.0), -1).masked_fill(~sees_any, 0.0)
    values = attention.values(context)
    return attention.output(weights.to(values.dtype) @ values)
