"""Recurrent sublayers of the families: their shapes from a config, and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anydecode.kernels.interface import Recurrence, RecurrenceWeights
from anydecode.models.families.values import Config, bool_value, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, refusal
from anydecode.models.network import Linear, RecurrentWeights
from anydecode.models.spec import RecurrentSpec

#: The layer types of configs that stand for a recurrent sublayer.
RECURRENT_TYPES = ("conv", "mamba", "linear_attention")


@dataclass(frozen=True)
class RecurrentLayout:
    """How a family describes and stores its recurrent sublayers.

    Attributes:
        spec: The architecture, from the config.
        read: Reads the weights of a layer, from the reader, the config, the layer's name, the spec
            and the hidden size.
    """

    spec: Callable[[Config], RecurrentSpec]
    read: Callable[[TensorReader, Config, str, RecurrentSpec, int], RecurrentWeights]


def _conv(
    reader: TensorReader, name: str, spec: RecurrentSpec, has_bias: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """A depthwise convolution, stored as `[width, 1, window]`, and its bias."""
    shape = spec.shape
    kernel = reader.tensor(f"{name}.weight", (shape.width, 1, shape.window))
    bias = reader.vector(f"{name}.bias", shape.width) if has_bias else None
    return kernel.reshape(shape.width, shape.window), bias


def _parts(
    reader: TensorReader, name: str, sizes: dict[str, int], hidden: int, has_bias: bool
) -> list[Linear]:
    """Ranges of consecutive rows of a matrix, as products of their own."""
    total, start, parts = sum(sizes.values()), 0, []
    for part, size in sizes.items():
        rows = slice(start, start + size)
        alias = f"{name}.{part}"
        parts.append(reader.linear(name, (total, hidden), has_bias, rows=rows, alias=alias))
        start += size
    return parts


def _short_conv_spec(config: Config) -> RecurrentSpec:
    size = int_value(config, "conv_L_cache", 3, high=MAX_COUNT)
    return RecurrentSpec(Recurrence("conv", int_value(config, "hidden_size"), size), "identity")


def _read_short_conv(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, has_bias = f"{layer}.conv", bool_value(config, "conv_bias")
    sizes = {"input_gate": hidden, "gate": hidden, "inputs": hidden}
    input_gate, gate, inputs = _parts(reader, f"{name}.in_proj", sizes, hidden, has_bias)
    output = reader.linear(f"{name}.out_proj", (hidden, hidden), has_bias)
    vectors = RecurrenceWeights(*_conv(reader, f"{name}.conv", spec, has_bias))
    return RecurrentWeights(inputs, gate, output, vectors, input_gate=input_gate)


#: LFM2: a gated short convolution.
SHORT_CONV = RecurrentLayout(_short_conv_spec, _read_short_conv)


def _mamba_spec(config: Config) -> RecurrentSpec:
    heads = int_value(config, "mamba_n_heads", high=MAX_COUNT)
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    dim = config.get("mamba_d_head")
    if dim in (None, "auto"):
        dim = inner // heads
    elif int_value(config, "mamba_d_head", high=MAX_COUNT) * heads != inner:
        raise refusal("mamba_d_head", dim, f"{inner} / {heads}")
    groups = int_value(config, "mamba_n_groups", 1, high=MAX_COUNT)
    size = int_value(config, "mamba_d_state", high=MAX_COUNT)
    limits = config.get("time_step_limit") or (0.0, math.inf)
    if len(limits) != 2 or not all(isinstance(limit, (int, float)) for limit in limits):
        raise refusal("time_step_limit", limits, "a list of two numbers")
    shape = Recurrence(
        "ssd",
        width=heads * dim + 2 * groups * size,
        window=int_value(config, "mamba_d_conv", 4, high=MAX_COUNT),
        activation="silu",
        num_heads=heads,
        head_dim=dim,
        num_groups=groups,
        state_size=size,
        step_limits=(float(limits[0]), float(limits[1])),
    )
    return RecurrentSpec(shape, norm="after", norm_groups=groups)


def _read_mamba(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    shape = spec.shape
    name = next((n for n in _MAMBA if reader.has_module(f"{layer}.{n}")), _MAMBA[0])
    name = f"{layer}.{name}"
    has_bias = bool_value(config, "mamba_proj_bias")
    sizes = {"gate": shape.width_out, "inputs": shape.width, "gates": shape.num_heads}
    gate, inputs, gates = _parts(reader, f"{name}.in_proj", sizes, hidden, has_bias)
    output = reader.linear(f"{name}.out_proj", (hidden, shape.width_out), has_bias)
    conv, bias = _conv(reader, f"{name}.conv1d", spec, bool_value(config, "mamba_conv_bias", True))
    heads = shape.num_heads
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=-np.exp(reader.vector(f"{name}.A_log", heads)),
        step_bias=reader.vector(f"{name}.dt_bias", heads),
        skip=reader.vector(f"{name}.D", heads),
    )
    norm = reader.vector(f"{name}.norm.weight", shape.width_out)
    return RecurrentWeights(inputs, gate, output, vectors, gates, norm=norm)


_MAMBA = ("mamba", "mixer")
#: Mamba-2 and hybrids with it.
MAMBA_2 = RecurrentLayout(_mamba_spec, _read_mamba)
