"""Opens drafters that are an early exit of their target: its first layers, and one trained layer
with a norm before the target's head. A layer without an MLP is the adapter of Kangaroo (Liu et al.,
arXiv:2404.18911).

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling
Control Mechanism" (EESD), arXiv:2406.03853. No files are published. The layout is the trained layer
as `exit_layer` in the names of Llama (of an adapter, the attention alone), `exit_norm`, the tokens
of the head's rows as in EAGLE-3, and the key `exit_after` of the config: the number of the target's
layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.dense_layer import read_attention, read_dense_layer
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
from anydecode.models.network import Network
from anydecode.models.spec import EARLY_EXIT, LayerSpec

_LAYER, _NORM = "exit_layer", "exit_norm"


def is_early_exit(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an early exit of its target."""
    return f"{_NORM}.weight" in checkpoint.tensors


def load_early_exit(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> Network:
    """The first layers of the target with the trained layer: a model of its own, which shares
    weights. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        return _read(checkpoint, target, TensorReader(checkpoint, dtype, _NORM), read_rows)


def _read(
    checkpoint: Checkpoint, target: Network, reader: TensorReader, read_rows: ReadRows
) -> Network:
    config, source, hidden = checkpoint.config, target.weights, target.spec.hidden_size
    count = int_value(config, "exit_after")
    if count >= target.spec.num_layers:
        allowed = f"1 to {target.spec.num_layers - 1}, as the target has {target.spec.num_layers}"
        raise refusal("exit_after", count, allowed)
    own = _layer_spec(checkpoint, hidden)
    if f"{_LAYER}.mlp.gate_proj.weight" in checkpoint.tensors:
        inner = int_value(config, "intermediate_size")
        layer = read_dense_layer(reader, _LAYER, own, hidden, inner, hidden)
    else:
        own = replace(own, mlp="none")
        layer = read_attention(reader, _LAYER, own, hidden, hidden)
    packed = [source.embedding, *source.tables]
    packed += [weight for one in source.layers[:count] for weight in one.matrices]
    head, tokens = _head(checkpoint, target, reader, read_rows, packed)
    spec = replace(
        target.spec,
        architecture=EARLY_EXIT,
        layers=(*target.spec.layers[:count], own),
        has_final_norm=True,
        head_size=0 if tokens is None else len(tokens),
    )
    weights = replace(
        source,
        layers=[*source.layers[:count], layer],
        final_norm=reader.vector(f"{_NORM}.weight", hidden),
        head=head,
        head_tokens=tokens,
    )
    return Network(spec, weights, packed=tuple(packed))


def _layer_spec(checkpoint: Checkpoint, hidden: int) -> LayerSpec:
    """The architecture of the trained layer."""
    plain = layer_config(dict(checkpoint.config), "llama")
    plain["num_hidden_layers"] = 1
    spec = spec_from_config(plain)
    (layer,) = spec.layers
    if not isinstance(layer.attention, Attention) or layer.num_experts or layer.latent:
        allowed = "a family of dense layers with keys and values"
        raise refusal("model_type", checkpoint.config.get("model_type"), allowed)
    if spec.hidden_size != hidden:
        raise refusal("hidden_size", spec.hidden_size, f"{hidden}, as the target's")
    return layer


def _head(
    checkpoint: Checkpoint,
    target: Network,
    reader: TensorReader,
    read_rows: ReadRows,
    packed: list[Weight],
) -> tuple[Weight, np.ndarray | None]:
    """The head and its tokens, if they are not all."""
    other, hidden = target.weights.head, target.spec.hidden_size
    if not reader.has("d2t"):
        shape = (target.spec.vocab_size, hidden)
        return own_or_target(reader, "lm_head", shape, other, packed, checkpoint.name), None
    size = int_value(checkpoint.config, "draft_vocab_size", high=MAX_TOKENS)
    tokens = head_tokens(checkpoint, size, target.spec.vocab_size)
    return reduced_head(reader, tokens, hidden, other, read_rows, checkpoint.name), tokens
