"""Zamba (Glorioso et al., 2024, arXiv:2405.16712): Mamba, whose channels are a few independent
heads, with one block of attention and an MLP that several layers share."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import RecurrenceWeights
from anydecode.models.families.causal.zamba2 import FAMILIES as ZAMBA_2
from anydecode.models.families.patterns import no_rope
from anydecode.models.families.recurrent import (
    HYBRID,
    RecurrentLayout,
    decay,
    depthwise,
    selective_shape,
)
from anydecode.models.families.values import Config, bool_value, int_value, num_layers
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, MAX_LAYERS, refusal
from anydecode.models.linear import Linear
from anydecode.models.network import RecurrentWeights
from anydecode.models.spec import RecurrentSpec


def _layer_types(config: Config) -> list[str]:
    """The block in the third layer, and in one of a period of those after it."""
    period = int_value(config, "attn_layer_period", 6, high=MAX_LAYERS)
    offset = int_value(config, "attn_layer_offset", 4, low=0, high=period - 1)
    blocks = [False, False, True]
    blocks += [layer % period == offset for layer in range(num_layers(config) - 3)]
    return [HYBRID if has_block else "mamba" for has_block in blocks]


def _sizes(config: Config) -> dict[str, Any]:
    """The size of heads, which share the width of the hidden states beside the embeddings."""
    width, heads = 2 * int_value(config, "hidden_size"), int_value(config, "num_attention_heads")
    if int_value(config, "attention_hidden_size", width) != width:
        raise refusal("attention_hidden_size", config["attention_hidden_size"], f"{width}")
    if config.get("hidden_mamba_act") not in (None, "silu"):
        raise refusal("hidden_mamba_act", config["hidden_mamba_act"], "silu")
    own = {} if config.get("layer_types") else {"layer_types": _layer_types(config)}
    return {"head_dim": int_value(config, "head_dim", width // heads, high=MAX_COUNT), **own}


def _spec(config: Config) -> RecurrentSpec:
    """Each head of Mamba has keys and queries of its own."""
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    groups = int_value(config, "n_mamba_heads", 2, high=MAX_COUNT)
    if inner % groups:
        raise refusal("n_mamba_heads", groups, f"a divisor of {inner}")
    dim = gcd(inner // groups, 64)
    shape = selective_shape(config, inner)
    return RecurrentSpec(
        replace(shape, num_groups=groups, num_heads=inner // dim, head_dim=dim),
    )


def _read(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    shape, options = spec.shape, (f"{layer}.mamba", f"{layer}.mamba_decoder.mamba")
    name = next(filter(reader.has_module, options), options[0])
    inner, size, heads = shape.width, shape.state_size, shape.num_groups
    has_bias, dim = bool_value(config, "mamba_proj_bias"), inner // heads
    rank = -(-hidden // 16)
    if config.get("mamba_dt_rank") != "auto":
        rank = int_value(config, "mamba_dt_rank", rank)
    rows = np.arange(2 * inner).reshape(inner, 2)  # an input beside its gate
    inputs, gate = (
        reader.linear(
            f"{name}.in_proj",
            (2 * inner, hidden),
            has_bias,
            rows=rows[:, part],
            alias=f"{name}.in_proj.{alias}",
        )
        for part, alias in enumerate(("inputs", "gate"))
    )
    conv, bias = depthwise(
        reader, f"{name}.conv1d", spec, bool_value(config, "mamba_conv_bias", True)
    )
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=decay(reader, name, (heads, dim, size)).reshape(inner, size),
        step_bias=reader.tensor(f"{name}.dt_proj_bias", (heads, dim)).ravel(),
        skip=reader.tensor(f"{name}.D", (heads, dim)).ravel(),
    )
    gates = reader.tensor(f"{name}.x_proj_weight", (heads, rank + 2 * size, dim))
    steps = reader.tensor(f"{name}.dt_proj_weight", (heads, dim, rank))
    down, keys, queries = np.split(gates, (rank, rank + size), axis=1)
    return RecurrentWeights(
        inputs,
        gate,
        reader.linear(f"{name}.out_proj", (hidden, inner), has_bias),
        vectors,
        gates=_diagonal(steps),
        keys=_diagonal(keys),
        queries=_diagonal(queries),
        step_down=_diagonal(down),
    )


def _diagonal(blocks: np.ndarray) -> Linear:
    """The product with the blocks of each head, `[heads, out, in]`, as one matrix."""
    heads, rows, columns = blocks.shape
    matrix = np.zeros((heads, rows, heads, columns), np.float32)
    matrix[np.arange(heads), :, np.arange(heads)] = blocks
    return Linear(plain_weight(matrix.reshape(heads * rows, heads * columns)))


FAMILIES = {
    "zamba": replace(
        ZAMBA_2["zamba2"],
        architectures=("ZambaForCausalLM",),
        layer_types=_layer_types,
        recurrent=RecurrentLayout(_spec, _read),
        rope_layers=no_rope,
        derived=_sizes,
        keys={"layers_block_type": ("layer_types",), "attention_head_dim": ("head_dim",)},
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    )
}
