"""Opens drafters of Clover and Clover-2, by their files.

Xiao et al., "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge",
arXiv:2405.00263; "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding",
arXiv:2408.00264. Layout: that of XiaoBin1992/clover, which is of Clover-2; no files of Clover are
published, so that its layout is our own: `clover_heads.N.attention` and `clover_heads.N.mlp`.

A regressive block (Clover's attention decoder) adds a token's values to the state, each head of
them times the cosine of its query and key. In Clover-2 the first token is added to the target's
state before its final norm; layers with keys and values of their own (the augmenting block) follow.
Each further token is added to the state of its parent by a second block, which all later heads
share. In Clover the augmenting block comes first, and each head has a regressive block and an MLP
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize_rows, plain_weight
from anydecode.kernels.interface import Attention, Backend, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.dense_layer import read_dense_layer
from anydecode.models.drafter_files import (
    ReadRows,
    check_target,
    head_rows,
    layer_config,
    mapped_tokens,
)
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.values import int_value, mapping_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import MAX_LAYERS, refusal
from anydecode.models.linear import Linear
from anydecode.models.network import ModelWeights, Network
from anydecode.models.spec import MAX_STEPS, ModelSpec, StateSpec
from anydecode.models.step_heads import StepNetwork

_FIRST, _LATER, _TOKENS = "clover_head_mlp_rnn", "clover_head_mlp_rnn2", "clover_embed_tokens"
_HEADS = "clover_heads"
#: Against a division by zero where a query or key is zero.
_EPS = 1e-12


@dataclass(eq=False)
class RegressiveBlock:
    """x + value(e) * cosine(query(norm(x)), key(e)), the cosine per head.

    `mean` is `[head_dim, head_dim]` of 1 / head_dim, which spreads the mean of a head over it.
    """

    norm: np.ndarray
    query: Linear
    key: Linear
    value: Linear
    num_heads: int
    mean: Weight

    def apply(self, backend: Backend, x: Any, tokens: Any, eps: float) -> Any:
        """The states `x` with the embeddings `tokens` added."""
        query = self.query.apply(backend, backend.rms_norm(x, self.norm, eps))
        key = self.key.apply(backend, tokens)
        query, key = (backend.rms_norm(y, None, _EPS, self.num_heads) for y in (query, key))
        products = backend.gated(query, key, "identity")
        cosine = backend.grouped_linear(products, [self.mean] * self.num_heads)
        value = self.value.apply(backend, tokens)
        return backend.add(x, backend.gated(cosine, value, "identity"))

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [self.query.weight, self.key.weight, self.value.weight, self.mean]


@dataclass(eq=False)
class CloverNetwork(StepNetwork):
    """A drafter of Clover-2 or Clover. Hidden states are the regressive state, then what the head
    reads.

    Attributes:
        block: The augmenting layers and their norm.
        regressive: The block of each step; the last one is that of later steps too.
        outputs: The products before the head of each step, likewise. In Clover-2: of the first
            state, and of later states with the embeddings of their tokens. In Clover: of the
            states, to which their SiLU is added.
        is_first_version: Whether it is of Clover.
        head_norm: The norm of these products, float32 `[hidden_size]`.
        tokens: The embeddings of tokens, which are `scale` times its rows.
    """

    block: Network | None = None
    regressive: list[RegressiveBlock] = field(default_factory=list)
    outputs: list[Linear] = field(default_factory=list)
    is_first_version: bool = False
    head_norm: np.ndarray | None = None
    tokens: Weight | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        """The target's hidden size."""
        return self.width // 2

    def step_layer(self, backend: Backend, x: Any, step: int, index: int) -> Any:
        assert self.block is not None and self.tokens is not None
        size, last, eps = self.size, self.spec.num_layers - 1, self.spec.norm_eps
        if step and index < last:
            return x
        state = backend.columns(x, 0, size)
        tokens = backend.token_rows(self.tokens, self.scale)
        regressive = self.regressive[min(step, len(self.regressive) - 1)]
        output = self.outputs[min(step, len(self.outputs) - 1)]
        if not step:
            if index == 0 and not self.is_first_version:
                state = regressive.apply(backend, state, tokens, eps)
            state = self.block.layer(backend, state, index)
            if index < last:
                return backend.join(state, backend.columns(x, size, size))
            state = self.block.final_norm(backend, state)
        if step or self.is_first_version:
            state = regressive.apply(backend, state, tokens, eps)
        if self.is_first_version:
            added = backend.activate(output.apply(backend, state), "silu")
            y = backend.add(state, added)
        else:
            y = output.apply(backend, backend.join(state, tokens) if step else state)
        return backend.join(state, backend.rms_norm(y, self.head_norm, eps))

    def step_head(self, backend: Backend, x: Any, step: int) -> Any:
        y = backend.columns(x, self.size, self.size)
        return self.scaled_logits(backend, backend.linear(y, self.weights.head))

    def step_matrices(self) -> Iterator[Weight]:
        assert self.block is not None and self.tokens is not None
        yield self.tokens
        yield self.weights.head
        for block in self.regressive:
            yield from block.matrices
        yield from (output.weight for output in self.outputs)
        for layer in self.block.weights.layers:
            yield from layer.matrices


def is_clover(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a drafter of Clover-2 or Clover."""
    return f"{_FIRST}.q.weight" in checkpoint.tensors or _is_first_version(checkpoint)


def _is_first_version(checkpoint: Checkpoint) -> bool:
    return f"{_HEADS}.0.attention.q.weight" in checkpoint.tensors


def load_clover(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> CloverNetwork:
    """The drafter of a checkpoint. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        return _Clover(checkpoint, target, dtype, read_rows).read()


class _Clover:
    def __init__(
        self, checkpoint: Checkpoint, target: Network, dtype: str | None, read_rows: ReadRows
    ) -> None:
        self.checkpoint, self.target, self.read_rows = checkpoint, target, read_rows
        self.is_first_version = _is_first_version(checkpoint)
        first = f"{_HEADS}.0.attention" if self.is_first_version else _FIRST
        self.reader = TensorReader(checkpoint, dtype, f"{first}.q")
        self.own = mapping_value(checkpoint.config, "clover")
        self.num_heads = int_value(self.own, "num_heads", high=MAX_STEPS)
        plain = {**layer_config(dict(checkpoint.config), "llama"), "num_hidden_layers": 1}
        self.layers = spec_from_config(plain)
        layer = self.layers.layers[0]
        is_dense = isinstance(layer.attention, Attention) and not layer.num_experts
        if not is_dense or layer.latent or layer.mlp != "gated" or layer.norms != "pre":
            raise refusal("model_type", checkpoint.config.get("model_type"), "a kind of Llama")
        self.hidden = target.spec.hidden_size
        if self.layers.hidden_size != self.hidden:
            own, allowed = self.layers.hidden_size, f"{self.hidden}, as the target's"
            raise refusal("hidden_size", own, allowed)

    def read(self) -> CloverNetwork:
        target = self.target
        packed = [target.weights.embedding]
        tokens = mapped_tokens(self.checkpoint, target.spec.vocab_size)
        head = head_rows(self.reader, tokens, target, self.read_rows, packed)
        block = self._block()
        weights = ModelWeights(packed[0], block.weights.layers, None, head, head_tokens=tokens)
        table, scale = packed[0], target.spec.embedding_scale
        if self.reader.has(f"{_TOKENS}.weight"):
            shape = (target.spec.vocab_size, self.hidden)
            table, scale = self.reader.matrix(_TOKENS, shape, is_outer=True), 1.0
        return CloverNetwork(
            self._spec(block, 0 if tokens is None else len(tokens)),
            weights,
            packed=tuple(packed),
            block=block,
            regressive=self._regressive(),
            outputs=self._outputs(),
            is_first_version=self.is_first_version,
            head_norm=self.reader.vector("clover_head_norm.weight", self.hidden),
            tokens=table,
            scale=scale,
        )

    def _spec(self, block: Network, head_size: int) -> ModelSpec:
        target = self.target.spec
        return ModelSpec(
            architecture="Clover" if self.is_first_version else "Clover2",
            vocab_size=target.vocab_size,
            hidden_size=2 * self.hidden + 1,
            max_positions=target.max_positions,
            norm_eps=self.layers.norm_eps,
            layers=block.spec.layers,
            states=StateSpec((target.num_layers,), self.hidden, num_heads=self.num_heads),
            has_final_norm=False,
            head_size=head_size,
            logit_scale=target.logit_scale,
            logit_softcap=target.logit_softcap,
        )

    def _block(self) -> Network:
        """The augmenting layers and their norm."""
        count = int_value(self.own, "num_layers", high=MAX_LAYERS)
        if self.reader.has_module(f"layers.{count}"):
            raise CheckpointError(
                f"num_layers is {count}, but {self.checkpoint.name} contains more layers"
            )
        inner = int_value(self.checkpoint.config, "intermediate_size")
        layer = self.layers.layers[0]
        weights = ModelWeights(
            self.target.weights.embedding,
            [
                read_dense_layer(
                    self.reader, f"layers.{index}", layer, self.hidden, inner, self.hidden
                )
                for index in range(count)
            ],
            self.reader.vector("clover_norm.weight", self.hidden),
            self.target.weights.head,
        )
        spec = replace(self.layers, layers=(layer,) * count)
        return Network(spec, weights, packed=(weights.embedding, weights.head))

    def _own_heads(self, part: str) -> list[str]:
        """The names of a part of each head of Clover."""
        if self.reader.has_module(f"{_HEADS}.{self.num_heads}"):
            raise CheckpointError(
                f"num_heads is {self.num_heads}, but {self.checkpoint.name} contains more heads"
            )
        return [f"{_HEADS}.{number}.{part}" for number in range(self.num_heads)]

    def _outputs(self) -> list[Linear]:
        read, size = self.reader.linear, self.hidden
        if self.is_first_version:
            return [read(name, (size, size), True) for name in self._own_heads("mlp")]
        return [
            read("clover_head_mlp", (size, size), True),
            read("clover_head_mlp2", (size, 2 * size), True),
        ]

    def _regressive(self) -> list[RegressiveBlock]:
        heads = int_value(self.checkpoint.config, "num_attention_heads")
        if self.hidden % heads:
            raise refusal("num_attention_heads", heads, f"a divisor of {self.hidden}")
        width = self.hidden // heads
        mean = plain_weight(np.full((width, width), 1 / width, np.float32), "clover_mean")
        names = self._own_heads("attention") if self.is_first_version else [_FIRST, _LATER]
        return [self._regressive_block(name, heads, mean) for name in names]

    def _regressive_block(self, name: str, heads: int, mean: Weight) -> RegressiveBlock:
        square = (self.hidden, self.hidden)
        query, key, value = (self.reader.linear(f"{name}.{part}", square, True) for part in "qkv")
        norm = self.reader.vector(f"{name}.input_layernorm.weight", self.hidden)
        return RegressiveBlock(norm, query, key, value, heads, mean)
