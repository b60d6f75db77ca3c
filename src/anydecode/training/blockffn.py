"""Training of a small BlockFFN model, from random weights, whose losses make chunks of tokens use
the same blocks (Song et al., arXiv:2507.08771).

The chunk loss is the mean probability that a block is used somewhere in a chunk, where a token uses
a block with the probability of its share of the router's weights. The locality loss is the
cross-entropy between the patterns of neighbouring tokens, of which a steep sigmoid of the router's
logits is a smooth form. The texts are the examples of the tasks.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model in
the layout of the released ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.training.checkpoint import save_blockffn
from anydecode.training.data import Batch, batches
from anydecode.training.run import check_budget
from anydecode.training.tokenizer import build_tokenizer
from anydecode.training.weight_run import WeightRun

#: How steep the sigmoid of the locality loss is.
STEEPNESS = 100.0
_EPS, _LATENT_EPS = 1e-5, 1e-6
#: The step of the examples on which a model is measured; those of a run are counted from 0.
_HELD_OUT_STEP = -1


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a model: `blocks` blocks of `block_size` per layer, heads whose keys have `nope`
    dimensions and `rope` rotated ones, and latent queries and keys of `query_rank` and `rank`."""

    vocab: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    blocks: int = 24
    block_size: int = 32
    nope: int = 24
    rope: int = 8
    query_rank: int = 64
    rank: int = 48

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.blocks * self.block_size,
            "num_hidden_layers": self.layers,
            "attention_type": "mla",
            "num_attention_heads": self.heads,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.rank,
            "ffn_type": "block",
            "hidden_act": "silu",
            "router_act": "relu",
            "expert_size": self.block_size,
            "num_experts": self.blocks,
            "norm_after_router": "rms",
            "max_position_embeddings": 512,
            "rms_norm_eps": _EPS,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "scale_emb": 1.0,
            "scale_depth": self.layers**0.5,
            "dim_model_base": self.width,
        }


def new_weights(shape: BlockShape, seed: int) -> dict[str, torch.Tensor]:
    """Random weights, by their names in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    width, keys = shape.width, shape.nope + shape.rope

    def matrix(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * size[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, width),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": matrix(shape.vocab, width),
    }
    for layer in range(shape.layers):
        parts = {
            "input_layernorm.weight": torch.ones(width),
            "post_attention_layernorm.weight": torch.ones(width),
            "self_attn.q_a_proj.weight": matrix(shape.query_rank, width),
            "self_attn.q_a_layernorm.weight": torch.ones(shape.query_rank),
            "self_attn.q_b_proj.weight": matrix(shape.heads * keys, shape.query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": matrix(shape.rank + shape.rope, width),
            "self_attn.kv_a_layernorm.weight": torch.ones(shape.rank),
            "self_attn.kv_b_proj.weight": matrix(shape.heads * shape.nope + width, shape.rank),
            "self_attn.o_proj.weight": matrix(width, width),
            "mlp.router_proj.weight": matrix(shape.blocks, width),
            "mlp.router_norm.weight": torch.ones(shape.blocks),
            "mlp.up_proj": matrix(shape.blocks, shape.block_size, width),
            "mlp.down_proj": matrix(shape.blocks, width, shape.block_size),
        }
        weights |= {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
    return weights


class Forward(NamedTuple):
    """Logits `[batch, length, vocab]`, and per layer the router's logits `[batch, length, blocks]`
    and what its ReLU leaves of them."""

    logits: torch.Tensor
    scores: list[torch.Tensor]
    used: list[torch.Tensor]


def forward(weights: dict[str, torch.Tensor], shape: BlockShape, tokens: torch.Tensor) -> Forward:
    """The model over whole texts `[batch, length]`."""
    scores, used = [], []
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        x = x + _attention(weights, f"{name}.self_attn", shape, _norm(weights, name, "input", x))
        y = _norm(weights, name, "post_attention", x)
        scores.append(functional.linear(y, weights[f"{name}.mlp.router_proj.weight"]))
        used.append(scores[-1].relu())
        shares = _rms(used[-1], weights[f"{name}.mlp.router_norm.weight"], _EPS)
        inner = torch.einsum("btd,ekd->btek", y, weights[f"{name}.mlp.up_proj"])
        gated = shares[..., None] * functional.silu(inner)
        x = x + torch.einsum("btek,edk->btd", gated, weights[f"{name}.mlp.down_proj"])
    logits = functional.linear(
        _rms(x, weights["model.norm.weight"], _EPS), weights["lm_head.weight"]
    )
    return Forward(logits, scores, used)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _norm(
    weights: dict[str, torch.Tensor], layer: str, where: str, x: torch.Tensor
) -> torch.Tensor:
    return _rms(x, weights[f"{layer}.{where}_layernorm.weight"], _EPS)


def _attention(
    weights: dict[str, torch.Tensor], name: str, shape: BlockShape, x: torch.Tensor
) -> torch.Tensor:
    """Multi-head latent attention."""

    def product(part: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.{part}.weight"])

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], shape.heads, -1).transpose(1, 2)

    q = _rms(product("q_a_proj", x), weights[f"{name}.q_a_layernorm.weight"], _LATENT_EPS)
    q = heads(product("q_b_proj", q))
    down = product("kv_a_proj_with_mqa", x)
    latent = down[..., : shape.rank]
    latent = _rms(latent, weights[f"{name}.kv_a_layernorm.weight"], _LATENT_EPS)
    kv = heads(product("kv_b_proj", latent))
    turned = _rotated(down[:, None, :, shape.rank :]).expand(-1, shape.heads, -1, -1)
    k = torch.cat([kv[..., : shape.nope], turned], -1)
    q = torch.cat([q[..., : shape.nope], _rotated(q[..., shape.nope :])], -1)
    mixed = functional.scaled_dot_product_attention(q, k, kv[..., shape.nope :], is_causal=True)
    return product("o_proj", mixed.transpose(1, 2).flatten(-2))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[batch, heads, length, rope]`."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def chunk_loss(used: torch.Tensor, size: int) -> torch.Tensor:
    """The mean probability that a block is used in a chunk of `size` consecutive tokens.

    Args:
        used: The router's weights, `[batch, length, blocks]`; tokens after the last whole chunk are
            left out.
        size: Tokens of a chunk.
    """
    count = used.shape[1] // size * size
    shares = used[:, :count] / used[:, :count].sum(-1, keepdim=True).clamp(min=1e-9)
    chunks = shares.reshape(len(shares), -1, size, shares.shape[-1])
    return 1 - torch.log(1 - chunks + 1e-5).sum(2).exp().mean()


def locality_loss(scores: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each token's pattern of blocks, as logits, and the next token's.

    Args:
        scores: The router's logits, `[batch, length, blocks]`.
    """
    steep = STEEPNESS * scores
    return functional.binary_cross_entropy_with_logits(steep[:, :-1], steep[:, 1:].sigmoid())


def unused_share(used: torch.Tensor, size: int) -> float:
    """The mean share of blocks that no token of a chunk uses, over all chunks of `size` consecutive
    tokens; `used` is `[batch, length, blocks]`."""
    return 1 - float((used > 0).unfold(1, size, 1).any(-1).double().mean())


@dataclass(frozen=True)
class BlockRecipe:
    """How a model is trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        batch: Examples per step.
        rate: Peak learning rate.
        chunk: Tokens of a chunk.
        chunk_weight: The factor of the chunk loss; 0: none.
        locality_weight: The factor of the locality loss; 0: none.
        seed: Random seed of data and weights.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 32
    rate: float = 2e-3
    chunk: int = 8
    chunk_weight: float = 1.0
    locality_weight: float = 0.05
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        if min(self.minutes or self.steps or 0, self.batch, self.chunk) <= 0:
            raise InvalidRequestError("minutes or steps, batch and chunk must be more than 0")
        if min(self.chunk_weight, self.locality_weight) < 0:
            raise InvalidRequestError("chunk_weight and locality_weight must be 0 or more")


class BlockRun(WeightRun):
    """A training run in a folder.

    Args:
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        shape: The sizes of the model; None: the default.

    Raises:
        InvalidRequestError: The folder holds a run with another shape or other losses.
    """

    recipe: BlockRecipe
    differs_in = "another shape or other losses"

    def __init__(self, folder: Path, recipe: BlockRecipe, shape: BlockShape | None = None) -> None:
        super().__init__(folder, recipe)
        self.tokenizer = build_tokenizer()
        self.shape = shape or BlockShape(self.tokenizer.get_vocab_size())
        self.weights = new_weights(self.shape, recipe.seed)
        for weight in self.weights.values():
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            self.weights.values(), recipe.rate, (0.9, 0.95), weight_decay=0.0
        )
        losses = [recipe.chunk, recipe.chunk_weight, recipe.locality_weight]
        self._resume(self.weights.values(), optimizer, [asdict(self.shape), losses])

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def _update(self) -> float:
        recipe = self.recipe
        total = torch.zeros(())
        parts = batches(self.tokenizer, recipe.batch, recipe.seed, self.step)
        for part in parts:
            found = forward(self.weights, self.shape, part.tokens[:, :-1])
            total = total + _text_loss(found.logits, part)
            size = min(recipe.chunk, part.tokens.shape[1] - 1)
            for scores, used in zip(found.scores, found.used, strict=True):
                regular = recipe.chunk_weight * chunk_loss(used, size)
                regular = regular + recipe.locality_weight * locality_loss(scores)
                total = total + regular / self.shape.layers
        return self._learn(total / len(parts))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss of other examples, and how many blocks tokens and chunks leave unused."""
        parts = batches(self.tokenizer, 64, self.recipe.seed, _HELD_OUT_STEP)
        losses, shares = [], {1: [0.0], self.recipe.chunk: [0.0]}
        for part in parts:
            found = forward(self.weights, self.shape, part.tokens[:, :-1])
            losses.append(float(_text_loss(found.logits, part)))
            for size, values in shares.items():
                if size < part.tokens.shape[1]:
                    values += [unused_share(used, size) for used in found.used]
        self._record(
            held_out={"answers": sum(losses) / len(losses)},
            unused={size: sum(v) / max(1, len(v) - 1) for size, v in shares.items()},
        )

    def _write(self) -> None:
        detached = {name: weight.detach() for name, weight in self.weights.items()}
        save_blockffn(self.model_folder, detached, self.shape.config, self.tokenizer)

    def unused(self) -> list[dict[int, float]]:
        """The shares of blocks that a token and a chunk of other examples leave unused, by their
        length, in the order in which they were measured."""
        return [entry["unused"] for entry in self.history if "unused" in entry]


def _text_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The weighted mean of the cross-entropy of the answers' tokens."""
    weights, targets = batch.weights[:, 1:], batch.tokens[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()
