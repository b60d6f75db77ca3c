"""Rotary embeddings and windows from the metadata of a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.families.values import rotary_share
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.lazy import Reader


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """The scaling of rotary frequencies; None for none."""
    factors = rope_factors(keys, "rope_freqs.weight")
    if factors is not None:
        # Llama 3 files store a divisor per frequency instead of the scaling parameters. LongRoPE is
        # the Hugging Face scaling that takes divisors.
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": keys.count("context_length"),
        }
    kind = keys.get("rope.scaling.type", None)
    if kind in (None, "none", "longrope"):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{keys.file.path}: rope scaling {kind!r} is not supported")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    for key, name in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if keys.get(f"rope.scaling.{key}", None) is not None:
            scaling[name] = keys.number(f"rope.scaling.{key}")
    return scaling


def rope_factors(keys: Keys, name: str) -> list[float] | None:
    """The divisors of rotary frequencies in a tensor; None if there is no such tensor."""
    if name not in keys.file.tensors:
        return None
    tensor = keys.file.read(name)
    assert isinstance(tensor, np.ndarray), "one-dimensional factors are stored unpacked"
    return [float(value) for value in tensor.astype(np.float32).ravel().tolist()]


def partial_rotary(keys: Keys, config: dict[str, Any]) -> None:
    """The share of a head that has a rotary position embedding."""
    rotary = keys.count("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotary_share(rotary, config["head_dim"])


def longrope(keys: Keys, config: dict[str, Any]) -> None:
    """Phi-3 and MiniCPM: the divisors of rotary frequencies for short and long contexts."""
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    long = rope_factors(keys, "rope_factors_long.weight")
    short = rope_factors(keys, "rope_factors_short.weight")
    if long is not None and short is not None:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        if keys.get("rope.scaling.attn_factor", None) is not None:
            config["rope_scaling"]["attention_factor"] = keys.number("rope.scaling.attn_factor")


def windows(keys: Keys, config: dict[str, Any]) -> None:
    """The window, and which layers have it: a list of flags, or the period of full attention."""
    config["sliding_window"] = keys.count("attention.sliding_window")
    pattern, count = keys.get("attention.sliding_window_pattern", 4), config["num_hidden_layers"]
    if not isinstance(pattern, list):
        period = keys.count("attention.sliding_window_pattern", 4)
        pattern = [(layer + 1) % period != 0 for layer in range(count)]
    if len(pattern) < count:
        raise CheckpointError(
            f"{keys.file.path}: attention.sliding_window_pattern has {len(pattern)} entries for"
            f" {count} layers"
        )
    config["layer_types"] = [
        "sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern[:count]
    ]


def deinterleaved(reader: Reader, num_heads: int) -> np.ndarray | Weight:
    """Reorder the rows of interleaved rotary pairs (2i, 2i + 1) to pairs (i, i + half). Whole rows
    are moved, so packed weights stay packed."""
    tensor = reader()
    data = tensor.data if isinstance(tensor, Weight) else tensor
    moved = data[half_order(len(data), num_heads)]
    if isinstance(tensor, Weight):
        return replace(tensor, data=moved)
    return moved


def half_order(num_rows: int, num_heads: int) -> np.ndarray:
    """The stored row of each row of `deinterleaved`."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def stored_order(num_rows: int, num_heads: int) -> np.ndarray:
    """The row of `deinterleaved` that each stored row is."""
    return np.argsort(half_order(num_rows, num_heads))


def interleaved(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows in the order in which files store them, from the order of `deinterleaved`."""
    return matrix[stored_order(len(matrix), num_heads)]
