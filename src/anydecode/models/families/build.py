"""A checkpoint's tensors as a `Transformer`, by the names of the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Weight
from anydecode.kernels.reference import ReferenceBackend
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import (
    FAMILIES,
    Config,
    flag,
    is_expert_layer,
    size_of,
    spec_from_config,
    text_config,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.network import (
    Experts,
    GatedMlp,
    LayerWeights,
    Linear,
    ModelWeights,
    Network,
)
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.models.transformer import Executor, Transformer


def build_model(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    backend: ReferenceBackend | None = None,
    *,
    max_positions: int | None = None,
    executor: Callable[[Network], Executor] | None = None,
) -> Transformer:
    """The model of a checkpoint.

    `dtype`: "float32", "bfloat16", "float16", "int8" (Q8_0), "int4" (Q4_0; the embedding and the
    head Q8_0), or None for the numbers as stored. `max_positions`: the context limit, see
    `spec_from_config`. Raises CheckpointError, naming what is missing, misshapen or unsupported.
    """
    spec = spec_from_config(checkpoint.config, dtype=dtype, max_positions=max_positions)
    backend = backend or ReferenceBackend()
    weights = read_weights(checkpoint, spec, dtype, backend.device)
    return Transformer(spec, weights, backend, name=checkpoint.name, executor=executor)


def read_weights(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: str | None, device: torch.device
) -> ModelWeights:
    """All weights of a model, on `device`, in the format that `dtype` names."""
    config = text_config(checkpoint.config)
    reader = TensorReader(checkpoint, dtype, device)
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = reader.matrix("embed_tokens", shape, outer=True)
    # Files written with tied embeddings leave the head out.
    tied = flag(config, "tie_word_embeddings")
    head = embedding if tied else reader.matrix("lm_head", shape, outer=True)
    offset = FAMILIES[config["model_type"]].norm_offset
    if reader.has_module(f"layers.{spec.num_layers}"):
        raise CheckpointError(
            f"num_hidden_layers is {spec.num_layers}; {checkpoint.name} holds more layers"
        )
    layers = [_Layer(reader, spec, config, index).read() for index in range(spec.num_layers)]
    norm = reader.vector("norm.weight", spec.hidden_size, offset)
    bias = reader.vector("lm_head.bias", spec.vocab_size) if reader.has("lm_head.bias") else None
    return ModelWeights(embedding, layers, norm, head, bias)


class _Layer:
    """Reads one layer."""

    def __init__(self, reader: TensorReader, spec: ModelSpec, config: Config, index: int) -> None:
        self._reader = reader
        self._config = config
        self._family = FAMILIES[config["model_type"]]
        self._spec: LayerSpec = spec.layers[index]
        self._hidden = spec.hidden_size
        self._index = index
        self._name = f"layers.{index}"

    def read(self) -> LayerWeights:
        query, key, value, output = self._attention()
        layer = LayerWeights(query, key, value, output, self._mlp())
        post, both = self._spec.norms == "post", self._spec.norms == "both"
        if not post:
            layer.attention_norm = self._norm("input_layernorm")
            second = "pre_feedforward_layernorm" if both else "post_attention_layernorm"
            layer.mlp_norm = self._norm(second)
        if post or both:
            layer.attention_post_norm = self._norm("post_attention_layernorm")
            layer.mlp_post_norm = self._norm("post_feedforward_layernorm")
        if self._spec.qk_norm is not None:
            shape = self._spec.attention
            per_head = self._spec.qk_norm == "head"
            heads, kv_heads = (1, 1) if per_head else (shape.num_heads, shape.num_kv_heads)
            layer.query_norm = self._norm("self_attn.q_norm", heads * shape.head_dim)
            layer.key_norm = self._norm("self_attn.k_norm", kv_heads * shape.head_dim)
        return layer

    def _norm(self, name: str, size: int | None = None) -> torch.Tensor:
        full = f"{self._name}.{name}.weight"
        return self._reader.vector(full, size or self._hidden, self._family.norm_offset)

    def _attention(self) -> tuple[Linear, Linear, Linear, Linear]:
        shape = self._spec.attention
        wide, narrow = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        bias = flag(self._config, "attention_bias")
        q, k, v = self._parts(
            "self_attn.qkv_proj",
            {"self_attn.q_proj": wide, "self_attn.k_proj": narrow, "self_attn.v_proj": narrow},
            bias or self._family.qkv_bias,
        )
        name = f"{self._name}.self_attn.o_proj"
        return q, k, v, self._reader.linear(name, (self._hidden, wide), bias)

    def _mlp(self) -> GatedMlp | Experts:
        if is_expert_layer(self._config, self._index):
            return self._experts()
        wide = size_of(self._config, "intermediate_size")
        bias = flag(self._config, "mlp_bias")
        gate, up = self._parts(
            "mlp.gate_up_proj", {"mlp.gate_proj": wide, "mlp.up_proj": wide}, bias
        )
        name = f"{self._name}.mlp.down_proj"
        return GatedMlp(gate, up, self._reader.linear(name, (self._hidden, wide), bias))

    def _parts(self, fused: str, sizes: dict[str, int], bias: bool) -> list[Linear]:
        """Matrices that a checkpoint stores one by one, or as rows of one fused matrix."""
        reader, hidden, fused = self._reader, self._hidden, f"{self._name}.{fused}"
        if not reader.has(f"{fused}.weight"):
            return [
                reader.linear(f"{self._name}.{name}", (size, hidden), bias)
                for name, size in sizes.items()
            ]
        total, start, parts = sum(sizes.values()), 0, []
        for name, size in sizes.items():
            rows, alias = slice(start, start + size), f"{self._name}.{name}"
            parts.append(reader.linear(fused, (total, hidden), bias, rows=rows, alias=alias))
            start += size
        return parts

    def _experts(self) -> Experts:
        names = [f"{self._name}.{position}" for position in ("mlp", "block_sparse_moe")]
        router = self._reader.first(f"{name}.gate" for name in names)
        count = self._spec.num_experts
        # A router is small, and a rounded one sends tokens to other experts.
        weight = self._reader.matrix(router, (count, self._hidden), keep=True)
        block = router.removesuffix(".gate")
        is_mixtral = self._config["model_type"] == "mixtral" or not block.endswith("mlp")
        wide = size_of(self._config, "intermediate_size" if is_mixtral else "moe_intermediate_size")
        if self._reader.has(f"{block}.experts.gate_up_proj"):
            return self._stacked_experts(weight, block, wide)
        gate, up, down = (
            [self._expert(block, expert, names, shape) for expert in range(count)]
            for names, shape in (
                (("gate_proj", "w1"), (wide, self._hidden)),
                (("up_proj", "w3"), (wide, self._hidden)),
                (("down_proj", "w2"), (self._hidden, wide)),
            )
        )
        return Experts(weight, gate, up, down)

    def _expert(
        self, block: str, expert: int, names: tuple[str, str], shape: tuple[int, int]
    ) -> Weight:
        name = self._reader.first(f"{block}.experts.{expert}.{name}" for name in names)
        return self._reader.matrix(name, shape)

    def _stacked_experts(self, router: Weight, block: str, wide: int) -> Experts:
        """Experts as `[experts, 2 * wide, hidden]` and `[experts, hidden, wide]`."""
        count, name = self._spec.num_experts, f"{block}.experts"
        both = self._reader.stacked(f"{name}.gate_up_proj", (count, 2 * wide, self._hidden))
        last = self._reader.stacked(f"{name}.down_proj", (count, self._hidden, wide))
        gate, up, down = [], [], []
        for expert in range(count):
            name = f"{block}.experts.{expert}"
            convert, pair = self._reader.convert, plain_weight(both[expert])
            gate.append(convert(pair, f"{name}.gate_proj", rows=slice(0, wide)))
            up.append(convert(pair, f"{name}.up_proj", rows=slice(wide, 2 * wide)))
            down.append(convert(plain_weight(last[expert]), f"{name}.down_proj"))
        return Experts(router, gate, up, down)
