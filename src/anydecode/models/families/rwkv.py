"""RWKV-7: its sizes from a config of flash-linear-attention, and the weights of its time mixing."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.kernels.interface import Recurrence, WkvWeights
from anydecode.models.families.recurrent import RecurrentLayout
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    list_value,
    num_layers,
    value_or,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, ConfigError, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.spec import RecurrentSpec
from anydecode.models.time_mix import LowRankProduct, TimeMixWeights

#: The context length: the recurrence has none.
_MAX_POSITIONS = 1 << 20
#: The six mixtures, as checkpoints name them.
MIXES = "rwkvag"
#: The low-rank products: module, key of the rank, activation, and whether there is a bias.
_PRODUCTS = {
    "decay": ("w_lora", "decay_low_rank_dim", "tanh", True),
    "rate": ("a_lora", "a_low_rank_dim", "identity", True),
    "gate": ("g_lora", "gate_low_rank_dim", "sigmoid", False),
    "value_mix": ("v_lora", "v_low_rank_dim", "identity", True),
}
#: The key of a rank -> its factor of the root of the hidden size, where the config has no rank.
_RANK_FACTORS = {
    "decay_low_rank_dim": 2.5,
    "a_low_rank_dim": 2.5,
    "gate_low_rank_dim": 5.0,
    "v_low_rank_dim": 1.7,
}


def rwkv7_sizes(config: Config) -> dict[str, Any]:
    """The keys that a config may leave to defaults, and a refusal of what is not supported."""
    hidden = int_value(config, "hidden_size")
    for key in ("norm_first", "norm_bias"):
        if not bool_value(config, key, True):
            raise refusal(key, False, "true")
    if config.get("attn") is not None:
        raise ConfigError("layers with attention (attn) are not supported in RWKV-7")
    values = config.get("value_dim")
    values = list_value(config, "value_dim", int) if isinstance(values, list) else [values]
    if any(value not in (None, hidden) for value in values or ()):
        raise refusal("value_dim", config["value_dim"], f"{hidden}, the hidden size")
    dim = _head_dim(config)
    sizes = {"head_dim": dim, "max_position_embeddings": _MAX_POSITIONS}
    if config.get("intermediate_size") is None:
        ratio = config.get("hidden_ratio")
        inner = int(hidden * number("hidden_ratio", 4 if ratio is None else ratio))
        sizes["intermediate_size"] = -(-inner // 32) * 32
    for key, factor in _RANK_FACTORS.items():
        if config.get(key) is None:
            wide = 1.0 if key == "gate_low_rank_dim" else dim / 64
            sizes[key] = max(32, round(factor * hidden**0.5 * wide / 32) * 32)
    return sizes


def _head_dim(config: Config) -> int:
    hidden = int_value(config, "hidden_size")
    is_counted = config.get("head_dim") is None and config.get("num_heads") is not None
    name = "num_heads" if is_counted else "head_dim"
    value = int_value(config, name, 64, high=MAX_COUNT)
    if hidden % value:
        raise refusal(name, value, f"a divisor of the hidden size {hidden}")
    return hidden // value if is_counted else value


def rwkv7_layers(config: Config) -> list[str]:
    """A recurrence in every layer."""
    return ["linear_attention"] * num_layers(config)


def _spec(config: Config) -> RecurrentSpec:
    hidden, dim = int_value(config, "hidden_size"), _head_dim(config)
    eps = number("norm_eps", value_or(config, "layer_norm_eps", 1e-5), 0.0, 1.0) * dim
    mixes_mlp = not bool_value(config, "has_gated_mlp")
    shape = Recurrence(
        "wkv",
        width=(1 + mixes_mlp) * hidden,
        window=1,
        num_heads=hidden // dim,
        head_dim=dim,
        num_groups=hidden // dim,
        state_size=dim,
        norm_eps=number("group_norm_eps", value_or(config, "group_norm_eps", eps), 0.0),
    )
    return RecurrentSpec(shape)


def _read(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> TimeMixWeights:
    name, shape = f"{layer}.attn", spec.shape
    heads = (shape.num_heads, shape.head_dim)

    def square(module: str) -> Linear:
        return reader.linear(f"{name}.{module}", (hidden, hidden), False)

    # These matrices are small, and their ranks need not divide into blocks: they keep their format.
    def product(part: str) -> LowRankProduct:
        module, key, activation, has_bias = _PRODUCTS[part]
        rank, full = int_value(config, key), f"{name}.{module}.lora"
        down = reader.matrix(f"{full}.0", (rank, hidden), keep_format=True)
        up = reader.matrix(f"{full}.2", (hidden, rank), keep_format=True)
        bias = reader.vector(f"{full}.2.bias", hidden) if has_bias else None
        return LowRankProduct(Linear(down), Linear(up, bias), activation)

    vectors = WkvWeights(
        key_scale=reader.vector(f"{name}.k_k", hidden),
        key_rate=reader.vector(f"{name}.k_a", hidden),
        bonus=reader.tensor(f"{name}.r_k", heads).ravel(),
    )
    if bool_value(config, "has_head_norms", True):
        vectors.norm, vectors.norm_bias = (
            reader.vector(f"{name}.g_norm.{part}", hidden) for part in ("weight", "bias")
        )
    has_gate = bool_value(config, "has_gate", True)
    return TimeMixWeights(
        _mixes(reader, name, hidden, MIXES if has_gate else MIXES[:-1]),
        square("r_proj"),
        square("k_proj"),
        square("v_proj"),
        square("o_proj"),
        product("decay"),
        product("rate"),
        product("gate") if has_gate else None,
        vectors,
        None if layer == "layers.0" else product("value_mix"),
    )


def _mixes(reader: TensorReader, name: str, hidden: int, mixes: str) -> np.ndarray:
    """The shares of the position before; the first checkpoints have them in one tensor."""
    if reader.has(f"{name}.x_x"):
        return reader.tensor(f"{name}.x_x", (len(mixes), hidden))
    parts = [reader.tensor(f"{name}.x_{part}", (1, 1, hidden)) for part in mixes]
    return np.concatenate(parts).reshape(len(mixes), hidden)


#: RWKV-7: time mixing.
TIME_MIX = RecurrentLayout(_spec, _read)
