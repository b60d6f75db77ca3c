"""SambaY: a decoder of two halves (Ren et al., "Decoder-Hybrid-Decoder Architecture for Efficient
Reasoning with Long Generation", arXiv:2507.06607), as released in Phi-4-mini-flash-reasoning.

The first half is recurrent layers (Mamba) and attention with a window in turn, and ends with one
layer of full attention. The layers of the second half store nothing: attention to the keys and
values of that layer, and gated memory units, which read the output of the last recurrence. So only
those rows of a prompt whose logits are wanted run through the second half.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.kernels import portable
from anydecode.kernels.interface import Attention
from anydecode.models.differential import NORM_EPS, DifferentialWeights
from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL, MEMORY_UNIT, SLIDING, no_rope
from anydecode.models.families.recurrent import RecurrentLayout, read_selective, selective_shape
from anydecode.models.families.values import Config, int_value, num_layers, value_or
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import refusal
from anydecode.models.memory_unit import MemoryUnit
from anydecode.models.network import RecurrentWeights
from anydecode.models.spec import RecurrentSpec


def layer_types(config: Config) -> list[str]:
    """The type of each layer, from the number of layers."""
    count = num_layers(config)
    if count % 4:
        raise refusal("num_hidden_layers", count, "a multiple of 4")
    if value_or(config, "mb_per_layer", 2) != 2:
        raise refusal("mb_per_layer", config["mb_per_layer"], "2")
    first = ["mamba", SLIDING] * (count // 4) + ["mamba", FULL]
    return first + [MEMORY_UNIT, FULL] * (count // 4 - 1)


def _derived(config: Config) -> dict[str, Any]:
    """The types of the layers, those that share keys and values, and the window: one number, or one
    for each layer that has it."""
    window = config.get("sliding_window")
    if isinstance(window, list):
        window = next((size for size in window if size is not None), None)
    types = layer_types(config)
    num_shared = len(types) - len(types) // 2 - 2
    return {"layer_types": types, "num_kv_shared_layers": num_shared, "sliding_window": window}


def _mamba_spec(config: Config) -> RecurrentSpec:
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    return RecurrentSpec(selective_shape(config, inner))


def _read_mamba(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    return read_selective(reader, config, f"{layer}.attn", spec, hidden)


def read_memory_unit(reader: TensorReader, layer: str, shape: tuple[int, int]) -> MemoryUnit:
    """The gated memory unit of a layer; `shape` is the size of the memory and the hidden size."""
    size, hidden = shape
    gate = reader.linear(f"{layer}.attn.in_proj", (size, hidden), False)
    return MemoryUnit(gate, reader.linear(f"{layer}.attn.out_proj", (hidden, size), False))


def read_differential(
    reader: TensorReader, name: str, index: int, shape: Attention, plain_eps: float | None
) -> DifferentialWeights:
    """The factor and the norm of the differential attention of layer `index`; `plain_eps` is the
    epsilon of a norm without weights (DiffLlama)."""
    dim = shape.head_dim // 2
    first, second = (
        float(
            portable.exp(
                math.fsum(
                    reader.vector(f"{name}.lambda_q{head}", dim).astype(np.float64)
                    * reader.vector(f"{name}.lambda_k{head}", dim).astype(np.float64)
                )
            )
        )
        for head in (1, 2)
    )
    start = 0.8 - 0.6 * float(portable.exp(-0.3 * index))
    if plain_eps is None:
        norm, eps = reader.vector(f"{name}.subln.weight", shape.head_dim), NORM_EPS
    else:
        norm, eps = np.ones(shape.head_dim, np.float32), plain_eps
    return DifferentialWeights(first - second + start, norm * np.float32(1 - start), eps)


PHI4FLASH = Family(
    ("Phi4FlashForCausalLM",),
    layer_types,
    norm="layer",
    has_norm_bias=True,
    recurrent=RecurrentLayout(_mamba_spec, _read_mamba),
    rope_layers=no_rope,
    derived=_derived,
    is_differential=True,
    keys={"mamba_dt_rank": ("time_step_rank",)},
    names={
        "norm": "final_layernorm",
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.q_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.out_proj",
        "self_attn.difference": "attn.inner_cross_attn",
        "mlp.gate_up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    },
    defaults={
        "tie_word_embeddings": True,
        "sliding_window": 2047,
        "num_key_value_heads": 4,
        "layer_norm_eps": 1e-5,
    },
)


@register(
    Card(
        "sambay",
        "serving",
        paper="Ren et al. 2025, Decoder-Hybrid-Decoder Architecture for Efficient Reasoning with"
        " Long Generation (arXiv:2507.06607)",
        exactness="token-exact",
        use="LLM(folder of such a model)",
        summary="Decoders of two halves: of a prompt, only the last row runs through the second.",
        needs=("a Phi-4-mini-flash model",),
        works_with=("every decoder that edits no caches", "batches", "prefix caches"),
        deviations=(
            "chunked prefill, prefix caches and prompt log-probabilities work; the rows that these"
            " ask for run through all layers",
            "a position that leaves the window keeps its keys and values until the sequence ends",
            "hidden states and the memory are float32",
        ),
    )
)
def sambay() -> Family:
    """The family of SambaY models."""
    return PHI4FLASH
