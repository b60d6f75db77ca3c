"""Clover and Clover-2: a state that takes in each drafted token, before or after layers with keys
and values of their own.

Xiao et al., "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge",
arXiv:2405.00263; "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding",
arXiv:2408.00264. Modules of Clover-2 are named as in the code of its authors (XiaoBin1992/clover).
`models/clover.py` opens the files of both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, LayerShape, copy_norm, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner, draft_losses
from anydecode.training.drafters.unrolled import UnrolledAttention, following
from anydecode.training.transformer import Norm

#: The bound of the uniform numbers that weights start with.
_SPREAD = 0.01


class RegressiveBlock(nn.Module):
    """Adds a token's values to a state, each head of them times the cosine of query and key; at
    first queries and keys are the normed state and the embedding, and values are near 0."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.q, self.k, self.v = (nn.Linear(shape.width, shape.width) for _ in "qkv")
        start_near_identity(self.q)
        start_near_identity(self.k)
        nn.init.uniform_(self.v.weight, b=_SPREAD)
        nn.init.zeros_(self.v.bias)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1))
            for part in (self.q(self.input_layernorm(x)), self.k(embedded), self.v(embedded))
        )
        cosine = functional.cosine_similarity(q, k, dim=-1)[..., None]
        return x + (v * cosine).flatten(-2)


@torch.no_grad()
def start_near_identity(linear: nn.Linear) -> None:
    """Set a matrix to uniform numbers near 0 plus the identity of its first inputs."""
    nn.init.uniform_(linear.weight, b=_SPREAD)
    linear.weight[:, : len(linear.weight)] += torch.eye(len(linear.weight))
    nn.init.zeros_(linear.bias)


class _Regressive(Learner):
    """What the drafters of Clover and Clover-2 share: layers, which start as the target's last one,
    and the norms behind them and before the head. They embed tokens as the target does (the code of
    Clover-2: by the rows of its head)."""

    default_rate = 1e-3
    num_layers: ClassVar[int]

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.shape, width = layer_shape(target), self.width
        if width % self.shape.heads:
            raise UnsupportedCombinationError(
                f"clover needs a hidden size that its {self.shape.heads} heads divide, not {width}"
            )
        self.layers = nn.ModuleList(DraftLayer(self.shape, width) for _ in range(self.num_layers))
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            layer.copy(target.weights.layers[-1])
        self.clover_norm = Norm(width, self.shape.norm_eps)
        self.clover_head_norm = Norm(width, self.shape.norm_eps)
        copy_norm(self.clover_norm, target.weights.final_norm)
        copy_norm(self.clover_head_norm, target.weights.final_norm)

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        """The last state before the final norm."""
        return (num_layers,)

    @property
    def max_drafts(self) -> int:
        return self.depth

    def _augmented(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            x = x + UnrolledAttention(layer.self_attn).step(layer.input_layernorm(x))
            x = layer.add_mlp(x)
        output: torch.Tensor = self.clover_norm(x)
        return output

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "clover": {"num_heads": self.depth, "num_layers": self.num_layers},
        }
        tensors = dict(self.state_dict())
        if has_head:  # of all tokens, which the layout has no head for: only the embeddings
            tensors["clover_embed_tokens.weight"] = self.embedding
        else:
            tensors["token_map"] = torch.tensor(self.vocabulary)
        return Files(config, tensors)


class Clover2(_Regressive):
    """The drafter of Clover-2 with two layers."""

    recipe = "clover-2"
    key = "clover-2"
    default_depth = 5
    step_decay = 0.7
    state_weight = 10.0
    num_layers = 2

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.clover_head_mlp_rnn = RegressiveBlock(self.shape)
        self.clover_head_mlp_rnn2 = RegressiveBlock(self.shape)
        self.clover_head_mlp = nn.Linear(self.width, self.width)
        self.clover_head_mlp2 = nn.Linear(2 * self.width, self.width)
        start_near_identity(self.clover_head_mlp)
        start_near_identity(self.clover_head_mlp2)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t starts from the target's state at position t and takes in the tokens from t + 1
        on."""
        outputs: list[torch.Tensor] = []
        state = batch.taps[:, :-1]
        for step, tokens in enumerate(following(batch.tokens, self.depth)):
            embedded = self.embed(tokens)
            if step:
                state = self.clover_head_mlp_rnn2(state, embedded)
                y = self.clover_head_mlp2(torch.cat([state, embedded], -1))
            else:
                state = self._augmented(self.clover_head_mlp_rnn(state, embedded))
                y = self.clover_head_mlp(state)
            outputs.append(self.clover_head_norm(y))
        return Drafted(outputs, [torch.arange(batch.tokens.shape[1] - 1)] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config, tensors = super().files(target, has_head)
        coefficients = {"heads_coefficient": 1.0, "decay_coefficient": self.step_decay}
        return Files({**config, "clover": {**config["clover"], **coefficients}}, tensors)


class Head(nn.Module):
    """A head of Clover: its attention decoder, and an MLP x + silu(W x + b), which at first adds
    0."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.attention = RegressiveBlock(shape)
        self.mlp = nn.Linear(shape.width, shape.width)
        nn.init.zeros_(self.mlp.weight)
        nn.init.zeros_(self.mlp.bias)


class Clover(_Regressive):
    """The drafter of Clover: one layer, then a head per drafted token. It learns the texts' tokens,
    each of its heads alike."""

    recipe = "clover"
    key = "clover"
    default_depth = 3
    step_decay = 1.0
    num_layers = 1

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.clover_heads = nn.ModuleList(Head(self.shape) for _ in range(depth))

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t starts from the target's state at position t; head i takes in the token at t + 1 +
        i."""
        outputs: list[torch.Tensor] = []
        state = self._augmented(batch.taps[:, :-1])
        steps = zip(self.clover_heads, following(batch.tokens, self.depth), strict=True)
        for head, tokens in steps:
            assert isinstance(head, Head)
            state = head.attention(state, self.embed(tokens))
            outputs.append(self.clover_head_norm(state + functional.silu(head.mlp(state))))
        return Drafted(outputs, [torch.arange(batch.tokens.shape[1] - 1)] * self.depth)

    def row_losses(
        self, log_p: torch.Tensor, log_q: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cross entropy of the texts' tokens."""
        _, acceptance = draft_losses(log_p, log_q.detach())
        return functional.nll_loss(log_q, labels, reduction="none"), acceptance
