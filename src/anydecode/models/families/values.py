"""Typed values of a config, with refusals that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anydecode.models.limits import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_SIZE,
    ConfigError,
    integer,
    number,
    refusal,
)

Config = Mapping[str, Any]


def int_value(
    config: Config, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
) -> int:
    """The integer under `key`; null counts as missing.

    Raises:
        CheckpointError: It is not an integer from `low` to `high`, or is missing without a default.
    """
    value = value_or(config, key, default)
    if value is None:
        raise ConfigError(f"the config lacks {key!r}")
    return integer(key, value, low, high)


def bool_value(config: Config, key: str, default: bool = False) -> bool:
    """The boolean under `key`; null counts as missing."""
    value = value_or(config, key, default)
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value


def value_or(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def optional_number(config: Config, key: str) -> float | None:
    """The number under `key`; None if it is null or missing."""
    value = config.get(key)
    return None if value is None else number(key, value)


def mapping_value(config: Config, key: str) -> dict[str, Any]:
    """A copy of the object under `key`; empty if it is null or missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refusal(key, value, "an object")
    return dict(value or {})


def list_value(config: Config, key: str, kind: type) -> list[Any] | None:
    """The list under `key`, with entries of one type; None if it is null or missing."""
    value = config.get(key)
    is_valid = isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
    if value is not None and not is_valid:
        raise refusal(key, value, f"a list of {kind.__name__}")
    return value


def layer_config(config: Config, layer: int) -> Config:
    """The config of one layer: `per_layer_config` has the keys that differ, by layer."""
    overrides = layer_overrides(config)
    return {**config, **mapping_value(overrides, str(layer))} if overrides else config


def layer_overrides(config: Config) -> dict[str, Any]:
    """`per_layer_config`, whose numbers of layers `transformers` writes with leading zeros."""
    overrides = mapping_value(config, "per_layer_config")
    return {str(int(key)) if key.isdecimal() else key: own for key, own in overrides.items()}


def num_layers(config: Config) -> int:
    """The number of layers."""
    return int_value(config, "num_hidden_layers", high=MAX_LAYERS)


def head_dim(config: Config) -> int:
    """Dimensions per head: `head_dim`, or else the hidden size divided by the number of heads."""
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    return int_value(config, "head_dim", int_value(config, "hidden_size") // heads, high=MAX_COUNT)


def rotary_size(config: Config) -> dict[str, Any]:
    """The share of a head that rotates, of configs with `rotary_dim`, the size of that part."""
    if config.get("rotary_dim") is None:
        return {}
    dim = head_dim(config)
    size = int_value(config, "rotary_dim", high=dim)
    return {"partial_rotary_factor": rotary_share(size, dim)}


def rotary_share(size: int, head_dim: int) -> float:
    """The share of a head that rotates, of which `head_dim` times, rounded down, is `size`."""
    share = size / head_dim
    return share if int(head_dim * share) == size else math.nextafter(share, 1.0)
