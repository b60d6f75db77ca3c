"""Opens the draft layer of LongSpec, which attends to the keys and values of its target's last
layer.

Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", arXiv:2502.17421, after Du et al., "GliDe with a CaPE" (arXiv:2402.02082). A row adds
to its token's embedding the output of attention in a sliding window of its own keys and values,
then of attention to the target's, then of an MLP. The target's keys and values are computed again
from the states before its last layer, with its own matrices. Layout, of our own: `self_attn`,
`cross_attn` (queries and output) and `mlp` in the names of Llama, the norms before each
(`input_layernorm`, `cross_layernorm`, `post_attention_layernorm`), and `norm` before the target's
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Backend
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafter_files import (
    ReadRows,
    check_target,
    head_tokens,
    layer_config,
    own_or_target,
    reduced_head,
)
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.values import int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import MAX_TOKENS, refusal
from anydecode.models.network import GatedMlp, LayerWeights, ModelWeights, Network
from anydecode.models.spec import LayerSpec, ModelSpec, StateSpec
from anydecode.models.states import StateWeights

_SELF, _CROSS, _MLP = "self_attn", "cross_attn", "mlp"
#: The layers of the network: attention to the window, and to the target's keys and values.
_WINDOW_LAYER, _CROSS_LAYER = 0, 1


@dataclass(eq=False)
class LongSpecNetwork(Network):
    """Two layers. The first also stores the keys and values of the second, from the states that the
    rows read; the second only attends to them."""

    def layer(self, backend: Backend, x: Any, index: int) -> Any:
        spec, weights = self.spec.layers[_CROSS_LAYER], self.weights.layers[_CROSS_LAYER]
        shape = spec.attention
        assert shape is not None and weights.output is not None
        if index == _WINDOW_LAYER:
            states = self.weights.states
            assert states is not None
            state = backend.rms_norm(x, states.state_norm, self.spec.norm_eps)
            k, v = self._keys_values(backend, state, spec, weights, shape)
            backend.store(k, v, _CROSS_LAYER, shape)
            x = backend.token_rows(self.weights.embedding, self.spec.embedding_scale)
            mixed = self._mixer_block(backend, x, _WINDOW_LAYER)
        else:
            y = backend.rms_norm(x, weights.attention_norm, self.spec.norm_eps)
            q = self._queries(backend, y, spec, weights)
            mixed = weights.output.apply(backend, backend.attend(q, _CROSS_LAYER, shape))
        return self._add_blocks(backend, x, mixed, index)


def is_longspec(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a draft layer of LongSpec."""
    return f"{_CROSS}.q_proj.weight" in checkpoint.tensors


def load_longspec(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> LongSpecNetwork:
    """The draft layer. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        reader = TensorReader(checkpoint, dtype, "norm")
        return _read(checkpoint, target, reader, read_rows)


def _read(
    checkpoint: Checkpoint, target: Network, reader: TensorReader, read_rows: ReadRows
) -> LongSpecNetwork:
    hidden, source = target.spec.hidden_size, target.weights
    window, cross = _layer_specs(checkpoint, target)
    size = 0
    if reader.has("d2t"):
        size = int_value(checkpoint.config, "draft_vocab_size", high=MAX_TOKENS)
    spec = ModelSpec(
        architecture="LongSpec",
        vocab_size=target.spec.vocab_size,
        hidden_size=hidden,
        max_positions=target.spec.max_positions,
        norm_eps=target.spec.norm_eps,
        layers=(window, cross),
        embedding_scale=target.spec.embedding_scale,
        logit_scale=target.spec.logit_scale,
        logit_softcap=target.spec.logit_softcap,
        states=StateSpec((target.spec.num_layers - 1,), hidden, joins="cross"),
        head_size=size,
    )
    last = source.layers[-1]
    assert last.key is not None and last.value is not None, "checked by `_layer_specs`"
    packed = [source.embedding, last.key.weight, last.value.weight]
    tokens, shape = None, (spec.vocab_size, hidden)
    if size:
        tokens = head_tokens(checkpoint, size, spec.vocab_size)
        head = reduced_head(reader, tokens, hidden, source.head, read_rows, checkpoint.name)
    else:
        head = own_or_target(reader, "lm_head", shape, source.head, packed, checkpoint.name)
    layers = [
        _attention(reader, window, hidden),
        _cross_layer(reader, checkpoint, cross, hidden, last),
    ]
    norm = reader.vector("norm.weight", hidden)
    weights = ModelWeights(source.embedding, layers, norm, head, head_tokens=tokens)
    weights.states = StateWeights(state_norm=last.attention_norm)
    return LongSpecNetwork(spec, weights, packed=tuple(packed))


def _layer_specs(checkpoint: Checkpoint, target: Network) -> tuple[LayerSpec, LayerSpec]:
    """The architectures of both attentions."""
    plain = layer_config(dict(checkpoint.config), "llama")
    plain["num_hidden_layers"] = 1
    (own,) = spec_from_config({**plain, "sliding_window": None}).layers
    last = target.spec.layers[-1]
    simple = LayerSpec(last.attention, last.rope, interleaved_rope=last.interleaved_rope)
    shape = last.attention
    is_simple = all(
        getattr(last, name) == getattr(simple, name)
        for name in (*vars(simple),)
        if name not in ("attention", "rope")
    )
    if not is_simple or shape is None or shape.window or shape.chunk or shape.latent_dim:
        raise CheckpointError(
            f"{checkpoint.name}: attends to keys and values of a last layer as Llama's, which the"
            " target has not"
        )
    if own.attention is None or own.num_experts or own.latent:
        raise refusal("model_type", checkpoint.config.get("model_type"), "a dense family")
    window = int_value(checkpoint.config, "sliding_window")
    return (
        replace(own, attention=replace(own.attention, window=window), mlp="none"),
        simple,
    )


def _attention(reader: TensorReader, spec: LayerSpec, hidden: int) -> LayerWeights:
    """The attention to the window and the norm before it."""
    shape = spec.attention
    assert shape is not None
    size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return LayerWeights(
        query=reader.linear(f"{_SELF}.q_proj", (size, hidden), False),
        key=reader.linear(f"{_SELF}.k_proj", (kv_size, hidden), False),
        value=reader.linear(f"{_SELF}.v_proj", (kv_size, hidden), False),
        output=reader.linear(f"{_SELF}.o_proj", (hidden, size), False),
        attention_norm=reader.vector("input_layernorm.weight", hidden),
    )


def _cross_layer(
    reader: TensorReader,
    checkpoint: Checkpoint,
    spec: LayerSpec,
    hidden: int,
    last: LayerWeights,
) -> LayerWeights:
    """The attention to the keys and values of the target's layer `last`, and the MLP."""
    shape, inner = spec.attention, int_value(checkpoint.config, "intermediate_size")
    assert shape is not None
    size = shape.num_heads * shape.head_dim
    return LayerWeights(
        query=reader.linear(f"{_CROSS}.q_proj", (size, hidden), False),
        key=last.key,
        value=last.value,
        output=reader.linear(f"{_CROSS}.o_proj", (hidden, size), False),
        attention_norm=reader.vector("cross_layernorm.weight", hidden),
        mlp=GatedMlp(
            reader.linear(f"{_MLP}.gate_proj", (inner, hidden), False),
            reader.linear(f"{_MLP}.up_proj", (inner, hidden), False),
            reader.linear(f"{_MLP}.down_proj", (hidden, inner), False),
        ),
        mlp_norm=reader.vector("post_attention_layernorm.weight", hidden),
    )
