"""PLaMo 2 (Preferred Elements, 2025, arXiv:2509.04897), a hybrid of Mamba and attention, and PLaMo
3, with windows. Their names and norms are converted when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.kernels.interface import RecurrenceWeights
from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL, SLIDING, full_every_nth
from anydecode.models.families.recurrent import (
    RecurrentLayout,
    decay,
    depthwise,
    selective_shape,
)
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    list_value,
    num_layers,
    value_or,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, MAX_LAYERS, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.network import RecurrentWeights
from anydecode.models.spec import RecurrentSpec


def _layer_types(config: Config) -> list[str]:
    """Attention in the middle of every `mamba_step` layers, or in the last layer of a few."""
    count, step = num_layers(config), int_value(config, "mamba_step", 2, high=MAX_LAYERS)
    if not bool_value(config, "mamba_enabled", True):
        return _attention(config, range(count))
    if count <= step // 2:
        return ["mamba"] * (count - 1) + _attention(config, [count - 1])
    return [
        _attention(config, [layer])[0] if layer % step == step // 2 else "mamba"
        for layer in range(count)
    ]


def _attention(config: Config, layers: Iterable[int]) -> list[str]:
    """The types of attention layers: with windows but where the config says otherwise."""
    full = list_value(config, "full_attention_idx", int) or []
    has_window = config.get("attention_window_size") is not None
    return [SLIDING if has_window and layer not in full else FULL for layer in layers]


def _window(config: Config) -> dict[str, Any]:
    """A row attends to as many keys before its own as `attention_window_size` says."""
    if config.get("attention_window_size") is None:
        return {}
    return {"sliding_window": int_value(config, "attention_window_size") + 1}


def _spec(config: Config) -> RecurrentSpec:
    """All channels of a head have its step and its decay, so that it is a recurrence of Mamba."""
    inner = int_value(config, "mamba_num_heads", high=MAX_COUNT) * int_value(config, "head_dim")
    eps = number("rms_norm_eps", value_or(config, "rms_norm_eps", 1e-6), 0.0, 1.0)
    return RecurrentSpec(selective_shape(config, inner), gate_norm_eps=eps)


def _read(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    shape, name = spec.shape, f"{layer}.mamba"
    inner, size, heads = shape.width, shape.state_size, int_value(config, "mamba_num_heads")
    head_of = np.repeat(np.arange(heads), inner // heads)
    rank = max(64, hidden // 16)
    rows = np.arange(2 * inner).reshape(heads, 2, -1)  # head by head: the gate, the input
    gate, inputs = (
        reader.linear(
            f"{name}.in_proj",
            (2 * inner, hidden),
            False,
            rows=rows[:, part].ravel(),
            alias=f"{name}.in_proj.{alias}",
        )
        for part, alias in enumerate(("gate", "inputs"))
    )
    conv, bias = depthwise(reader, f"{name}.conv1d", spec, False)
    rates = decay(reader, name, (heads,))[head_of, None]
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=np.ascontiguousarray(np.broadcast_to(rates, (inner, size))),
        step_bias=reader.vector(f"{name}.dt_proj.bias", heads)[head_of],
        skip=reader.vector(f"{name}.D", heads)[head_of],
    )

    # As in Mamba, these matrices keep their format.
    def part(alias: str, start: int, count: int) -> Linear:
        full, sizes = f"{name}.x_proj", (2 * size + rank, inner)
        rows = slice(start, start + count)
        weight = reader.matrix(full, sizes, rows=rows, alias=f"{full}.{alias}", keep_format=True)
        return Linear(weight)

    steps = reader.matrix(f"{name}.dt_proj", (heads, rank), rows=head_of, keep_format=True)
    weights = RecurrentWeights(
        inputs,
        gate,
        reader.linear(f"{name}.out_proj", (hidden, inner), False),
        vectors,
        gates=Linear(steps),
        keys=part("keys", 0, size),
        queries=part("queries", size, size),
        step_down=part("step_down", 2 * size, rank),
    )
    weights.gate_norms = [
        reader.vector(f"{name}.{part}_layernorm.weight", count)
        for part, count in (("b", size), ("c", size), ("dt", rank))
    ]
    return weights


def _windows(config: Config) -> list[str]:
    """Full attention in every n-th layer, if there are windows."""
    if config.get("sliding_window") is None:
        return [FULL] * num_layers(config)
    return full_every_nth(config)


def _scaling(config: Config) -> dict[str, Any]:
    """The scaling of the rotary embedding, which the config has as keys of its own."""
    factor = config.get("rope_scaling_factor")
    if factor in (None, 1) or config.get("rope_scaling") is not None:
        return {}
    if config.get("initial_context_length") is None:
        raise refusal("initial_context_length", None, "a number with rope_scaling_factor")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": config["initial_context_length"],
        "truncate": False,
    }
    return {"rope_scaling": scaling}


_PLAMO_3 = Family(
    ("Plamo3ForCausalLM", "PLaMo3ForCausalLM"),
    _windows,
    norms="both",
    qk_norm="head",
    derived=_scaling,
    keys={
        "window_size": ("sliding_window",),
        "rope_local_theta": ("rope_local_base_freq",),
    },
    defaults={
        "head_dim": 128,
        "sliding_window_pattern": 8,
        "tie_word_embeddings": True,
    },
)
FAMILIES = {
    "plamo2": replace(
        _PLAMO_3,
        architectures=("Plamo2ForCausalLM", "PLaMo2ForCausalLM"),
        layer_types=_layer_types,
        qk_norm="heads",
        recurrent=RecurrentLayout(_spec, _read),
        derived=_window,
        keys={"hidden_size_per_head": ("head_dim",)},
        defaults={"head_dim": 128, "mamba_d_state": 64, "tie_word_embeddings": True},
    ),
    "plamo3": _PLAMO_3,
}
