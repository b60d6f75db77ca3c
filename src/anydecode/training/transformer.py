"""The network that is trained: a Llama-style transformer with causal, full or block-causal
attention.

Modules are named as in LLaDA (Nie et al., arXiv:2502.09992), so that a state dict under the prefix
`model.` is a checkpoint in its layout. The class is for training; the engine runs the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class CanvasShape:
    """How the rows of a diffusion model see and predict positions.

    Attributes:
        logit_shift: 1 if a row predicts the position after its own (Dream).
        block_size: Rows see their own block of so many positions, counted from the first, and those
            before it (SDAR); None: rows see all positions.
        has_prompt_block: Whether the prompt is one block, and the others are counted from its end
            (Efficient-DLM).
        has_causal_context: Whether what is before the block that is filled is causal, and blocks
            are counted from the end of the prompt (Nemotron-Labs-Diffusion).
        context_predicts_next: Whether the last row before a block predicts its first position.
        is_ordered: Whether rows of a block see what is before them in an order, in which masks
            follow all other tokens (WeDLM).
    """

    vocab: int
    logit_shift: int = field(default=0, kw_only=True)
    block_size: int | None = field(default=None, kw_only=True)
    has_prompt_block: bool = field(default=False, kw_only=True)
    has_causal_context: bool = field(default=False, kw_only=True)
    context_predicts_next: bool = field(default=False, kw_only=True)
    is_ordered: bool = field(default=False, kw_only=True)

    @property
    def starts_at_prompt_end(self) -> bool:
        """Whether blocks are counted from the end of the prompt."""
        return self.has_prompt_block or self.has_causal_context

    def block_origin(self, prompt: int) -> int:
        """The position from which blocks are counted, behind a prompt of so many tokens."""
        return prompt if self.starts_at_prompt_end else 0


@dataclass(frozen=True)
class Shape(CanvasShape):
    """Sizes and parts of the network.

    Attributes:
        hidden: The width of the gated MLP.
        kv_heads: Heads of keys and values; None: as many as of queries.
        head_size: Dimensions per head; None: an equal share of the width.
        has_bias: Whether queries, keys and values have biases (Qwen2).
        has_head_norms: Whether each head of queries and keys is normed (Qwen3).
        is_tied: Whether the head is the embedding.
        num_experts: The number of experts of each layer, `hidden` wide; 0 for one MLP.
        experts_per_token: How many of them a token has.
        normalises_experts: Whether the weights of these are divided by their sum.
        frequencies: Of the rotary embedding, one per pair of dimensions of a head; None: powers of
            `rope_theta`.
        rope_factor: What the cosines and sines are multiplied by.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 384
    max_positions: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    kv_heads: int | None = None
    head_size: int | None = None
    has_bias: bool = False
    has_head_norms: bool = False
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    normalises_experts: bool = True
    frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0

    @property
    def head_width(self) -> int:
        """Dimensions per head."""
        return self.head_size or self.width // self.heads


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x), self.eps)


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    """Attention and a gated MLP or experts, each after a norm. `ff_proj` is the gate of the MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries = shape.heads * shape.head_width
        keys = (shape.kv_heads or shape.heads) * shape.head_width
        self.head_width = shape.head_width
        self.has_head_norms = shape.has_head_norms
        self.attn_norm = Norm(shape.width, shape.norm_eps)
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.has_bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.has_bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.has_bias)
        if shape.has_head_norms:
            self.q_norm = Norm(shape.head_width, shape.norm_eps)
            self.k_norm = Norm(shape.head_width, shape.norm_eps)
        self.attn_out = nn.Linear(queries, shape.width, bias=False)
        self.ff_norm = Norm(shape.width, shape.norm_eps)
        self.experts_per_token = shape.experts_per_token
        self.normalises_experts = shape.normalises_experts
        if shape.num_experts:
            self.router = nn.Linear(shape.width, shape.num_experts, bias=False)
            self.experts = nn.ModuleList(
                Expert(shape.width, shape.hidden) for _ in range(shape.num_experts)
            )
            return
        self.ff_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ff_out = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        x = self.attend(x, rope, causal, visible)
        return x + self.mlp(x)

    def attend(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """The states behind the attention."""
        return self.mix(x, *self.heads(x, rope), causal, visible)

    def heads(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[batch, heads, rows, head_width]`, the first two rotated."""
        normed = self.attn_norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.has_head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v

    def mix(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """The states behind the attention of rows `x` with queries `q` to keys and values, which
        may be of more rows."""
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        states: torch.Tensor = x + self.attn_out(attended.transpose(1, 2).flatten(-2))
        return states

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP or the experts add to states behind the attention."""
        normed = self.ff_norm(x)
        if self.experts_per_token:
            return self._mixture(normed)
        added: torch.Tensor = self.ff_out(
            functional.silu(self.ff_proj(normed)) * self.up_proj(normed)
        )
        return added

    def _mixture(self, normed: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of each row's experts."""
        rows = normed.flatten(0, -2)
        best = self.router(rows).float().softmax(-1).topk(self.experts_per_token, -1)
        weights = best.values
        if self.normalises_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, choice = (best.indices == number).nonzero(as_tuple=True)
            share = weights[row, choice, None].to(rows)
            mixed = mixed.index_add(0, row, expert(rows[row]) * share)
        return mixed.view_as(normed)


class Transformer(nn.Module):
    """A transformer that returns logits: `[batch, length]` tokens to `[batch, length, vocab]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(shape.vocab, shape.width),
                "blocks": nn.ModuleList(Block(shape) for _ in range(shape.layers)),
                "ln_f": Norm(shape.width, shape.norm_eps),
                "ff_out": nn.Linear(shape.width, shape.vocab, bias=False),
            }
        )
        if shape.is_tied:
            self.transformer["ff_out"].weight = self.transformer["wte"].weight
        half = shape.head_width // 2
        rates = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        if shape.frequencies is not None:
            rates = torch.tensor(shape.frequencies)
        angles = torch.arange(shape.max_positions, dtype=torch.float32)[:, None] * rates
        angles = torch.cat([angles, angles], dim=-1)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos() * shape.rope_factor, persistent=False)
        self.register_buffer("sin", angles.sin() * shape.rope_factor, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_residual = "blocks" in name and name.endswith(
                    ("attn_out.weight", "ff_out.weight")
                )
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** (0.5 * is_residual))

    @property
    def blocks(self) -> list[Block]:
        """The layers, first to last."""
        return [*self.transformer["blocks"]]  # type: ignore[misc]

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        causal: bool = False,
        output_rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of all positions, or of selected ones.

        Args:
            tokens: `[batch, length]`.
            causal: Whether attention is causal.
            output_rows: A bool mask `[batch, length]`, or row and column indices: only these
                positions' logits are returned, `[selected, vocab]`.
            positions: `[length]`; 0, 1, ... by default.
            visible: bool `[length, length]`: which positions (columns) each position attends to.
        """
        return self.head(
            self.states(
                tokens, causal=causal, output_rows=output_rows, positions=positions, visible=visible
            )
        )

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """The logits `[..., vocab]` of states after the final norm."""
        logits: torch.Tensor = self.transformer["ff_out"](states)
        return logits

    def states(
        self,
        tokens: torch.Tensor,
        *,
        causal: bool = False,
        output_rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The states after the final norm, `[..., width]`; arguments as those of the logits, or
        embeddings `[batch, length, width]` in place of the tokens."""
        indices = torch.arange(tokens.shape[1]) if positions is None else positions
        rope = self.cos[indices], self.sin[indices]
        x = tokens if tokens.is_floating_point() else self.transformer["wte"](tokens)
        for block in self.blocks:
            x = block(x, rope, causal, visible)
        x = x if output_rows is None else x[output_rows]
        normed: torch.Tensor = self.transformer["ln_f"](x)
        return normed


def block_of(positions: torch.Tensor, block: int, origin: int = 0) -> torch.Tensor:
    """The number of the block of each position: blocks of `block` positions are counted from
    `origin`, and what is before it is block -1."""
    return (positions - origin).div(block, rounding_mode="floor").clamp(min=-1)


def stream_mask(
    streams: torch.Tensor,
    positions: torch.Tensor,
    block: int,
    origin: int = 0,
    has_causal_context: bool = False,
) -> torch.Tensor:
    """bool `[rows, rows]`: which rows (columns) each row attends to, by stream (0: the clean text,
    else a masked copy) and position. A masked block attends to itself and to the clean blocks
    before it; a clean block to the clean blocks up to itself, or its rows to those up to
    themselves (`has_causal_context`). For `origin`, see `block_of`."""
    blocks = block_of(positions, block, origin)
    is_earlier, same_block = blocks[:, None] > blocks, blocks[:, None] == blocks
    within = same_block & (streams[:, None] == streams)
    clean = is_earlier | within
    if has_causal_context:
        is_clean = (streams == 0)[:, None]
        clean = torch.where(is_clean, positions[:, None] >= positions, is_earlier)
    return torch.where(streams == 0, clean, within)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]
