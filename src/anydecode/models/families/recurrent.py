"""Recurrent sublayers of the families: their shapes from a config, and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.formats import dequantize, plain_weight
from anydecode.kernels.interface import Recurrence, RecurrenceWeights, Weight
from anydecode.models.families.values import (
    Config,
    bool_value,
    head_dim,
    int_value,
    num_layers,
    value_or,
)
from anydecode.models.families.weights import TensorReader, attention_name
from anydecode.models.limits import MAX_COUNT, MAX_FACTOR, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.mlstm import Mlstm
from anydecode.models.network import RecurrentWeights
from anydecode.models.spec import RecurrentSpec
from anydecode.models.time_mix import TimeMix

#: The layer types of configs that stand for a recurrent sublayer.
RECURRENT_TYPES = ("conv", "mamba", "linear_attention")
#: The type of layers with attention and a recurrence in parallel.
HYBRID = "hybrid"


@dataclass(frozen=True)
class RecurrentLayout:
    """How a family describes and stores its recurrent sublayers.

    Attributes:
        spec: The architecture, from the config.
        read: Reads the weights of a layer, from the reader, the config, the layer's name, the spec
            and the hidden size.
    """

    spec: Callable[[Config], RecurrentSpec]
    read: Callable[
        [TensorReader, Config, str, RecurrentSpec, int], RecurrentWeights | TimeMix | Mlstm
    ]


def depthwise(
    reader: TensorReader, name: str, spec: RecurrentSpec, has_bias: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """A depthwise convolution, stored as `[width, 1, window]`, and its bias."""
    shape = spec.shape
    kernel = reader.tensor(f"{name}.weight", (shape.width, 1, shape.window))
    bias = reader.vector(f"{name}.bias", shape.width) if has_bias else None
    return kernel.reshape(shape.width, shape.window), bias


def decay(reader: TensorReader, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The decay, which is stored as its logarithm, or (GGUF) as it is."""
    if reader.has(f"{name}.A"):
        return reader.tensor(f"{name}.A", shape)
    return decay_of(reader.tensor(f"{name}.A_log", shape))


def decay_of(logarithms: np.ndarray) -> np.ndarray:
    """The decay from the logarithms of its size, float32."""
    rates: np.ndarray = -portable.exp(logarithms)
    return rates.astype(np.float32)


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
    vectors = RecurrenceWeights(*depthwise(reader, f"{name}.conv", spec, has_bias))
    return RecurrentWeights(inputs, gate, output, vectors, input_gate=input_gate)


#: LFM2: a gated short convolution.
SHORT_CONV = RecurrentLayout(_short_conv_spec, _read_short_conv)


def _mamba_spec(config: Config) -> RecurrentSpec:
    heads = int_value(config, "mamba_n_heads", high=MAX_COUNT)
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    inner = int_value(config, "mamba_d_ssm", inner)
    dim = config.get("mamba_d_head")
    if dim in (None, "auto"):
        dim = inner // heads
    elif int_value(config, "mamba_d_head", high=MAX_COUNT) * heads != inner:
        raise refusal("mamba_d_head", dim, f"{inner} / {heads}")
    groups = int_value(config, "mamba_n_groups", 1, high=MAX_COUNT)
    size = int_value(config, "mamba_d_state", high=MAX_COUNT)
    window = int_value(config, "mamba_d_conv", 4, high=MAX_COUNT)
    shape = _shape("ssd", window, (heads, dim), (groups, size), step_limits=_step_limits(config))
    return RecurrentSpec(shape, norm="after", norm_groups=groups)


def _shape(
    rule: str, window: int, values: tuple[int, int], keys: tuple[int, int], **options: Any
) -> Recurrence:
    """A recurrence with a state, from the number and size of its values and of its keys."""
    (heads, dim), (groups, size) = values, keys
    return Recurrence(
        rule,
        width=heads * dim + 2 * groups * size,
        window=window,
        activation="silu",
        num_heads=heads,
        head_dim=dim,
        num_groups=groups,
        state_size=size,
        **options,
    )


def _step_limits(config: Config) -> tuple[float, float]:
    """The limits of the steps. Saved configs have an object in place of infinity."""
    given = config.get("time_step_limit") or (0.0, math.inf)
    limits: list[Any] = []
    if isinstance(given, list | tuple):
        limits = [x.get("__float__") if isinstance(x, dict) else x for x in given]
        limits = [math.inf if x == "Infinity" else x for x in limits]
    if len(limits) != 2:
        raise refusal("time_step_limit", given, "a list of two numbers")
    low, high = (x if x == math.inf else number("time_step_limit", x, 0.0) for x in limits)
    return low, high


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
    conv, bias = depthwise(
        reader, f"{name}.conv1d", spec, bool_value(config, "mamba_conv_bias", True)
    )
    heads = shape.num_heads
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=decay(reader, name, (heads,)),
        step_bias=reader.vector(f"{name}.dt_bias", heads),
        skip=reader.vector(f"{name}.D", heads),
    )
    norm = None if spec.norm is None else reader.vector(f"{name}.norm.weight", shape.width_out)
    return RecurrentWeights(inputs, gate, output, vectors, gates, norm=norm)


_MAMBA = ("mamba", "mixer", "mamba_decoder.mamba")
#: Mamba-2 and hybrids with it.
MAMBA_2 = RecurrentLayout(_mamba_spec, _read_mamba)


def _selective_spec(config: Config) -> RecurrentSpec:
    if value_or(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise refusal("hidden_act", config["hidden_act"], "silu")
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    return RecurrentSpec(selective_shape(config, int_value(config, "intermediate_size", inner)))


def selective_shape(config: Config, inner: int) -> Recurrence:
    """The recurrence of Mamba with `inner` channels."""
    size = int_value(config, "mamba_d_state", 16, high=MAX_COUNT)
    # The channels are independent: heads are the parts that threads divide them into.
    dim = math.gcd(inner, 64)
    return Recurrence(
        "selective",
        width=inner,
        window=int_value(config, "mamba_d_conv", 4, high=MAX_COUNT),
        activation="silu",
        num_heads=inner // dim,
        head_dim=dim,
        num_groups=1,
        state_size=size,
    )


def step_rank(config: Config) -> int:
    """The inner size of the product that gives the steps of Mamba."""
    rank = -(-int_value(config, "hidden_size") // 16)
    if config.get("time_step_rank") == "auto":
        return rank
    return int_value(config, "time_step_rank", rank)


def _read_selective(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    return read_selective(reader, config, f"{layer}.mixer", spec, hidden)


def read_selective(
    reader: TensorReader, config: Config, name: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    """The weights of a Mamba mixer called `name`."""
    shape = spec.shape
    inner, size = shape.width, shape.state_size
    has_bias = bool_value(config, "mamba_proj_bias")
    sizes = {"inputs": inner, "gate": inner}
    inputs, gate = _parts(reader, f"{name}.in_proj", sizes, hidden, has_bias)
    output = reader.linear(f"{name}.out_proj", (hidden, inner), has_bias)
    conv, bias = depthwise(
        reader, f"{name}.conv1d", spec, bool_value(config, "mamba_conv_bias", True)
    )
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=decay(reader, name, (inner, size)),
        step_bias=reader.vector(f"{name}.dt_proj.bias", inner),
        skip=reader.vector(f"{name}.D", inner),
    )
    rank = step_rank(config)

    # These matrices are small, and many ranks do not divide into blocks: they keep their format.
    # Adapters cannot target either; of `dt_proj`, transformers reads the weight alone.
    def small(matrix: str, shape: tuple[int, int], part: str, rows: slice) -> Linear:
        full = f"{name}.{matrix}"
        weight = reader.matrix(full, shape, rows=rows, alias=f"{full}.{part}", keep_format=True)
        return Linear(weight)

    gates = (rank + 2 * size, inner)
    return RecurrentWeights(
        inputs,
        gate,
        output,
        vectors,
        gates=small("dt_proj", (inner, rank), "steps", slice(None)),
        step_down=small("x_proj", gates, "step_down", slice(0, rank)),
        keys=small("x_proj", gates, "keys", slice(rank, rank + size)),
        queries=small("x_proj", gates, "queries", slice(rank + size, rank + 2 * size)),
    )


#: Mamba, whose gates depend on the output of the convolution.
MAMBA = RecurrentLayout(_selective_spec, _read_selective)


def _falcon_mamba_spec(config: Config) -> RecurrentSpec:
    eps = number("mixer_rms_eps", value_or(config, "mixer_rms_eps", 1e-6), 0.0, 1.0)
    return replace(_selective_spec(config), gate_norm_eps=eps)


#: Falcon-Mamba: Mamba with norms of the gates.
FALCON_MAMBA = RecurrentLayout(_falcon_mamba_spec, _read_selective)


def _jamba_spec(config: Config) -> RecurrentSpec:
    inner = int_value(config, "mamba_expand", 2) * int_value(config, "hidden_size")
    eps = number("rms_norm_eps", value_or(config, "rms_norm_eps", 1e-6), 0.0, 1.0)
    return RecurrentSpec(selective_shape(config, inner), gate_norm_eps=eps)


def _read_jamba(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name = f"{layer}.mamba"
    weights = read_selective(reader, config, name, spec, hidden)
    assert weights.step_down is not None
    size, rank = spec.shape.state_size, weights.step_down.weight.out_features
    weights.gate_norms = [
        reader.vector(f"{name}.{part}_layernorm.weight", count)
        for part, count in (("b", size), ("c", size), ("dt", rank))
    ]
    return weights


#: Jamba: Mamba with norms of the gates that have weights.
JAMBA = RecurrentLayout(_jamba_spec, _read_jamba)


def _falcon_h1_spec(config: Config) -> RecurrentSpec:
    spec = _mamba_spec(config)
    if not bool_value(config, "mamba_rms_norm"):
        return replace(spec, norm=None, norm_groups=1)
    is_before = bool_value(config, "mamba_norm_before_gate", True)
    return replace(spec, norm="before" if is_before else "after")


def _read_falcon_h1(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    weights, shape = _read_mamba(reader, config, layer, spec, hidden), spec.shape
    before, after = (multiplier(config, f"ssm_{place}_multiplier") for place in ("in", "out"))
    gate, *channels, step = multipliers(config, "ssm_multipliers", 5)
    # The convolution is linear, so that its weights may be multiplied in place of its inputs.
    num_keys = shape.num_groups * shape.state_size
    sizes = [shape.width_out, num_keys, num_keys]
    factors = np.repeat(np.array(channels, np.float32) * np.float32(before), sizes)
    weights.vectors.conv = weights.vectors.conv * factors[:, None]
    assert weights.gates is not None
    for linear, factor in ((weights.gate, gate), (weights.inputs, 1.0), (weights.gates, step)):
        if linear.bias is not None:
            linear.bias = linear.bias / np.float32(before)
        if linear is not weights.inputs:
            linear.scale = before * factor
    weights.output.scale = after
    return weights


def multiplier(config: Config, key: str) -> float:
    """A factor of Falcon-H1."""
    return number(key, value_or(config, key, 1.0))


def multipliers(config: Config, key: str, count: int) -> list[float]:
    """A list of factors of Falcon-H1."""
    values = value_or(config, key, [1.0] * count)
    if not isinstance(values, list) or len(values) != count:
        raise refusal(key, values, f"a list of {count} numbers")
    return [number(key, value) for value in values]


#: Falcon-H1: Mamba-2 with factors.
FALCON_H1 = RecurrentLayout(_falcon_h1_spec, _read_falcon_h1)


def _delta_spec(config: Config) -> RecurrentSpec:
    heads = int_value(config, "linear_num_value_heads", 32, high=MAX_COUNT)
    groups = int_value(config, "linear_num_key_heads", 16, high=MAX_COUNT)
    dim = int_value(config, "linear_value_head_dim", 128, high=MAX_COUNT)
    size = int_value(config, "linear_key_head_dim", 128, high=MAX_COUNT)
    window = int_value(config, "linear_conv_kernel_dim", 4, high=MAX_COUNT)
    is_tiled = bool_value(config, "has_tiled_keys")  # GGUF files of Qwen3.5
    shape = _shape("delta", window, (heads, dim), (groups, size), has_tiled_keys=is_tiled)
    gate = value_or(config, "output_gate_type", "silu")  # of Qwen3.8
    if gate not in ("silu", "sigmoid"):
        raise refusal("output_gate_type", gate, "'silu' or 'sigmoid'")
    return RecurrentSpec(shape, gate=gate, norm="before", norm_groups=heads)


def _read_delta(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, shape = f"{layer}.linear_attn", spec.shape
    num_values, num_keys = shape.width_out, shape.num_groups * shape.state_size
    # Checkpoints have queries, keys and values in this order.
    last_first = np.concatenate(
        [
            np.arange(2 * num_keys, shape.width),
            np.arange(num_keys, 2 * num_keys),
            np.arange(num_keys),
        ]
    )
    if reader.has(f"{name}.in_proj_qkv.weight"):
        inputs = reader.linear(f"{name}.in_proj_qkv", (shape.width, hidden), False, rows=last_first)
        gate = reader.linear(f"{name}.in_proj_z", (num_values, hidden), False)
    else:
        inputs, gate = _interleaved_inputs(reader, name, shape, hidden)
    if reader.has(f"{name}.in_proj_ba.weight"):
        gates = _interleaved_gates(reader, name, shape, hidden)
    else:
        gates = _separate_gates(reader, name, shape, hidden)
    conv, bias = depthwise(reader, f"{name}.conv1d", spec, False)
    vectors = RecurrenceWeights(
        np.ascontiguousarray(conv[last_first]),
        bias,
        decay=decay(reader, name, (shape.num_heads,)),
        step_bias=reader.vector(f"{name}.dt_bias", shape.num_heads),
    )
    output = reader.linear(f"{name}.out_proj", (hidden, num_values), False)
    norm = reader.vector(f"{name}.norm.weight", shape.head_dim)
    return RecurrentWeights(inputs, gate, output, vectors, Linear(gates), norm=norm)


def interleaved_rows(shape: Recurrence) -> tuple[np.ndarray, ...]:
    """The rows of queries, keys, values and gates in the matrix of Qwen3-Next that has, per key
    head, those of one query, one key, and the values and gates of its heads."""
    size, values = shape.state_size, shape.width_out // shape.num_groups
    part = np.arange(shape.num_groups * 2 * (size + values)).reshape(shape.num_groups, -1)
    parts = np.split(part, [size, 2 * size, 2 * size + values], 1)
    return tuple(rows.ravel() for rows in parts)


def _interleaved_inputs(
    reader: TensorReader, name: str, shape: Recurrence, hidden: int
) -> tuple[Linear, Linear]:
    """The inputs and the gate of Qwen3-Next."""
    query, key, value, gate = interleaved_rows(shape)
    rows = np.concatenate([value, key, query])
    full, size = f"{name}.in_proj_qkvz", (len(rows) + len(gate), hidden)
    inputs, gates = (
        reader.linear(full, size, False, rows=order, alias=f"{full}.{alias}")
        for order, alias in ((rows, "inputs"), (gate, "gate"))
    )
    return inputs, gates


def _interleaved_gates(reader: TensorReader, name: str, shape: Recurrence, hidden: int) -> Weight:
    """The strengths and steps of Qwen3-Next, which are stored per key head."""
    order = np.arange(shape.num_gates).reshape(shape.num_groups, 2, -1).swapaxes(0, 1).ravel()
    return reader.matrix(f"{name}.in_proj_ba", (shape.num_gates, hidden), rows=order)


def _separate_gates(reader: TensorReader, name: str, shape: Recurrence, hidden: int) -> Weight:
    """The strengths and steps of Qwen3.5, as one matrix."""
    strengths, steps = (
        reader.matrix(f"{name}.in_proj_{part}", (shape.num_heads, hidden)) for part in "ba"
    )
    return _stacked(strengths, steps, f"{name}.in_proj_ba")


def _stacked(first: Weight, second: Weight, name: str) -> Weight:
    """The rows of two matrices as one matrix."""
    parts = [first, second]
    if len({(part.format, part.scale) for part in parts}) > 1:  # GGUF
        parts = [plain_weight(dequantize(part)) for part in parts]
    data = np.concatenate([part.data for part in parts])
    return replace(parts[0], out_features=len(data), data=data, name=name)


#: Qwen3-Next and Qwen3.5: the gated delta rule.
GATED_DELTA = RecurrentLayout(_delta_spec, _read_delta)


def _kimi_delta_spec(config: Config) -> RecurrentSpec:
    heads = int_value(config, "linear_num_heads", high=MAX_COUNT)
    dim = int_value(config, "linear_head_dim", high=MAX_COUNT)
    window = int_value(config, "linear_conv_kernel_dim", high=MAX_COUNT)
    shape = _shape("kda", window, (heads, dim), (heads, dim))
    return RecurrentSpec(shape, gate="sigmoid", norm="before", norm_groups=heads)


def _read_kimi_delta(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, shape = attention_name(reader, layer), spec.shape
    heads, dim, size = shape.num_heads, shape.head_dim, shape.width_out
    forget = f"{name}.forget_gate"  # of transformers, not of published checkpoints
    forget = forget if reader.has_module(forget) else name

    def linear(module: str, shape: tuple[int, int]) -> Linear:
        return reader.linear(module, shape, False)

    values, keys, queries = (linear(f"{name}.{part}_proj", (size, hidden)) for part in "vkq")
    if reader.has(f"{forget}.A"):  # GGUF, where that of Ling is positive
        decay = -np.abs(reader.vector(f"{forget}.A", heads))
    else:
        stored = f"{forget}.A_log"
        axes = (heads,) if len(reader.shape(stored)) == 1 else (1, 1, heads, 1)
        decay = -np.exp(reader.tensor(stored, axes).ravel())
    vectors = RecurrenceWeights(
        _separate_convolutions(reader, name, shape),
        decay=decay,
        step_bias=reader.vector(f"{forget}.dt_bias", size),
    )
    output = reader.first(f"{name}.{part}" for part in ("o_proj", "dense"))
    weights = RecurrentWeights(
        values,
        values,
        linear(output, (hidden, size)),
        vectors,
        norm=reader.vector(f"{name}.o_norm.weight", dim),
        keys=keys,
        queries=queries,
        strengths=linear(f"{name}.b_proj", (heads, hidden)),
    )
    if reader.has(f"{name}.g_proj.weight"):  # Ling and Kimi K3
        weights.gate = linear(f"{name}.g_proj", (size, hidden))
    else:
        weights.gate = linear(f"{name}.g_b_proj", (size, dim))
        weights.gate_down = linear(f"{name}.g_a_proj", (dim, hidden))
    if reader.has(f"{forget}.f_proj.weight"):  # Ling
        weights.gates = linear(f"{forget}.f_proj", (size, hidden))
    else:
        weights.gates = linear(f"{forget}.f_b_proj", (size, dim))
        weights.step_down = linear(f"{forget}.f_a_proj", (dim, hidden))
    return weights


def _separate_convolutions(reader: TensorReader, name: str, shape: Recurrence) -> np.ndarray:
    """The convolutions of values, keys and queries, `[width, window]`, which are stored one by one;
    transformers has them as one, queries first."""
    num_keys, window = shape.num_groups * shape.state_size, shape.window
    sizes = {"v": shape.width_out, "k": num_keys, "q": num_keys}
    if reader.has(f"{name}.conv1d.weight"):
        stored = reader.tensor(f"{name}.conv1d.weight", (shape.width, 1, window))
        parts = np.split(stored.reshape(shape.width, window), [num_keys, 2 * num_keys])[::-1]
        return np.ascontiguousarray(np.concatenate(parts))
    parts = []
    for part, size in sizes.items():
        one = f"{name}.{part}_conv1d.weight"
        axes = (size, 1, window) if len(reader.shape(one)) > 2 else (size, window)
        parts.append(reader.tensor(one, axes).reshape(size, window))
    return np.ascontiguousarray(np.concatenate(parts))


#: Kimi Linear: the gated delta rule with a decay per number of the key.
KIMI_DELTA = RecurrentLayout(_kimi_delta_spec, _read_kimi_delta)


def _limited_delta_spec(config: Config) -> RecurrentSpec:
    spec = _kimi_delta_spec(config)
    if not bool_value(config, "kda_safe_gate", True):
        return spec
    low = number("kda_lower_bound", value_or(config, "kda_lower_bound", -5.0), -MAX_FACTOR, -1e-6)
    return replace(spec, shape=replace(spec.shape, min_exponent=low))


#: Ling 3, GLM-5.3 and Kimi K3: that of Kimi Linear with a limit of the decay.
LIMITED_DELTA = RecurrentLayout(_limited_delta_spec, _read_kimi_delta)


def _olmo_delta_spec(config: Config) -> RecurrentSpec:
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    groups = int_value(config, "linear_num_key_heads", heads, high=MAX_COUNT)
    size = int_value(
        config, "linear_key_head_dim", 3 * int_value(config, "hidden_size") // (4 * groups)
    )
    strength = 2.0 if bool_value(config, "linear_allow_neg_eigval", True) else 1.0
    shape = _shape(
        "delta",
        int_value(config, "linear_conv_kernel_dim", 4, high=MAX_COUNT),
        (
            int_value(config, "linear_num_value_heads", heads, high=MAX_COUNT),
            int_value(config, "linear_value_head_dim", 2 * size, high=MAX_COUNT),
        ),
        (groups, size),
        max_strength=strength,
    )
    return RecurrentSpec(shape, norm="before", norm_groups=shape.num_heads, norm_eps=1e-5)


def _read_olmo_delta(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, shape = f"{layer}.linear_attn", spec.shape
    heads, size, num_keys = shape.num_heads, shape.width_out, shape.num_groups * shape.state_size
    values, keys, queries, gate = (
        reader.linear(f"{name}.{part}_proj", (count, hidden), False)
        for part, count in (("v", size), ("k", num_keys), ("q", num_keys), ("g", size))
    )
    strengths = reader.matrix(f"{name}.b_proj", (heads, hidden))
    steps = reader.matrix(f"{name}.a_proj", (heads, hidden))
    vectors = RecurrenceWeights(
        _separate_convolutions(reader, name, shape),
        decay=decay(reader, name, (heads,)),
        step_bias=reader.vector(f"{name}.dt_bias", heads),
    )
    return RecurrentWeights(
        values,
        gate,
        reader.linear(f"{name}.o_proj", (hidden, size), False),
        vectors,
        Linear(_stacked(strengths, steps, f"{name}.gates")),
        norm=reader.vector(f"{name}.o_norm.weight", shape.head_dim),
        keys=keys,
        queries=queries,
    )


#: OLMo's hybrid: the gated delta rule with separate matrices, whose strengths may exceed 1.
OLMO_DELTA = RecurrentLayout(_olmo_delta_spec, _read_olmo_delta)


def _lightning_spec(config: Config) -> RecurrentSpec:
    if value_or(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise refusal("hidden_act", config["hidden_act"], "silu")
    heads, dim = int_value(config, "num_attention_heads", high=MAX_COUNT), head_dim(config)
    # A window of one position is no convolution, but for its activation.
    shape = _shape("retention", 1, (heads, dim), (heads, dim))
    return RecurrentSpec(shape, gate="sigmoid", norm="before", norm_eps=1e-6)


def _read_lightning(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, shape = f"{layer}.self_attn", spec.shape
    heads, size = shape.num_heads, shape.width_out
    # Each head has its query, its key and its value.
    order = np.arange(3 * size).reshape(heads, 3, -1)[:, ::-1].swapaxes(0, 1).ravel()
    inputs = reader.linear(f"{name}.qkv_proj", (3 * size, hidden), False, rows=order)
    depth = int(layer.rpartition(".")[2]) / (num_layers(config) - 1 + 1e-5)
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads) * (1 - depth + 1e-5)
    vectors = RecurrenceWeights(
        np.ones((shape.width, 1), np.float32), decay=-slopes.astype(np.float32)
    )
    output = reader.first((f"{name}.out_proj", f"{name}.o_proj"))  # the latter in GGUF files
    return RecurrentWeights(
        inputs,
        reader.linear(f"{name}.output_gate", (size, hidden), False),
        reader.linear(output, (hidden, size), False),
        vectors,
        norm=reader.vector(f"{name}.norm.weight", size),
    )


#: MiniMax-Text-01: lightning attention, whose states decay by a factor of each head and layer.
LIGHTNING = RecurrentLayout(_lightning_spec, _read_lightning)


def _lru_spec(config: Config) -> RecurrentSpec:
    width = int_value(config, "lru_width", int_value(config, "hidden_size"))
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    if width % heads:
        raise refusal("lru_width", width, f"a multiple of the {heads} heads")
    shape = Recurrence(
        "lru",
        width=width,
        window=int_value(config, "conv1d_width", 4, high=MAX_COUNT),
        num_heads=heads,
        head_dim=width // heads,
        num_groups=heads,
        state_size=1,
    )
    if value_or(config, "hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise refusal("hidden_activation", config["hidden_activation"], "gelu_pytorch_tanh")
    return RecurrentSpec(shape, gate="gelu_tanh")


def _read_lru(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> RecurrentWeights:
    name, shape = f"{layer}.temporal_block", spec.shape
    width, heads, dim = shape.width, shape.num_heads, shape.head_dim
    inputs, gate = (
        reader.linear(f"{name}.linear_{part}", (width, hidden), True) for part in ("x", "y")
    )
    output = reader.linear(f"{name}.linear_out", (hidden, width), True)
    conv, bias = depthwise(reader, f"{name}.conv_1d", spec, True)
    lru = f"{name}.rg_lru"

    # The matrices of heads are small and keep their format. They are stored transposed.
    def blocks(part: str) -> list[Weight]:
        stack = reader.stacked(f"{lru}.{part}_weight", (heads, dim, dim))
        return [
            plain_weight(np.ascontiguousarray(block.T), f"model.{lru}.{part}.{head}")
            for head, block in enumerate(stack)
        ]

    biases = [
        reader.tensor(f"{lru}.{part}_gate_bias", (heads, dim)).ravel()
        for part in ("input", "recurrent")
    ]
    parameter = reader.vector(f"{lru}.recurrent_param", width)
    vectors = RecurrenceWeights(
        conv,
        bias,
        decay=-8.0 * portable.softplus(parameter).astype(np.float32),
        step_bias=np.concatenate(biases),
    )
    return RecurrentWeights(
        inputs,
        gate,
        output,
        vectors,
        input_blocks=blocks("input_gate"),
        recurrence_blocks=blocks("recurrent_gate"),
    )


#: RecurrentGemma: the gated linear recurrent unit of Griffin.
GATED_LRU = RecurrentLayout(_lru_spec, _read_lru)
