"""Rotary frequencies for the rope scalings of `transformers`.

In `transformers`, the scalings `dynamic` and `longrope` depend on the current length of the
sequence, so the result of a token at a position changes as the text grows. Here they depend only on
the context length with which the model is opened. Up to the length the model was trained for (the
default), the results equal those of `transformers`. With a longer context, `dynamic` uses the base
of the full length and `longrope` its long factors, from the first position on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.interface import Rope
from anydecode.models.limits import ConfigError, integer, number, refusal

_ALIASES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}


def rope_type(parameters: Mapping[str, Any]) -> str:
    """The name of the scaling; "default" if there is none."""
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return _ALIASES.get(name, name)


def make_rope(
    parameters: Mapping[str, Any], head_dim: int, trained_positions: int, max_positions: int
) -> Rope:
    """Frequencies from the `rope_parameters` of one layer type.

    Args:
        parameters: `rope_theta` and the keys of the scaling, such as
            `original_max_position_embeddings`.
        head_dim: Dimensions of a head.
        trained_positions: `max_position_embeddings`.
        max_positions: The context length.

    Raises:
        CheckpointError: The scaling is unknown, or a key is missing or invalid.
    """
    scaling = rope_type(parameters)
    if scaling not in _SCALINGS:
        raise ConfigError(f"rope scaling {scaling!r} is not supported")
    fraction = parameters.get("partial_rotary_factor")
    dim = (
        head_dim if fraction is None else int(head_dim * number("partial_rotary_factor", fraction))
    )
    if scaling == "proportional":
        dim = head_dim
    # The formulas of these scalings divide by the size less 2.
    min_dim = 4 if scaling in ("dynamic", "ntk_alpha") else 2
    if dim % 2 or not min_dim <= dim <= head_dim:
        allowed = f"an even number from {min_dim} to the {head_dim} dimensions of a head"
        raise refusal("the rotary size", dim, allowed)
    checked = {
        k: _checked_parameter(k, value) for k, value in parameters.items() if value is not None
    }
    try:
        return _SCALINGS[scaling](checked, dim, trained_positions, max_positions)
    except KeyError as error:
        raise ConfigError(f"rope scaling {scaling!r} lacks {error.args[0]!r}") from None


#: The minimum and maximum of each parameter that is a number. Factors of single frequencies may be
#: up to 1e31: 1e30, which float32 rounds up, disables the frequency.
_BOUNDS = {
    "rope_theta": (1.001, 1e18),
    "factor": (1e-6, 1e6),
    "partial_rotary_factor": (0.0, 1.0),
    **dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), (1e-6, 1e6)),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "alpha": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}


def _checked_parameter(key: str, value: Any) -> Any:
    """A parameter, checked for type and range."""
    if key in _BOUNDS:
        return number(key, value, *_BOUNDS[key])
    if key == "truncate" and not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    if key == "original_max_position_embeddings":
        return integer(key, value)
    if key in ("long_factor", "short_factor"):
        if not isinstance(value, list):
            raise refusal(key, value, "a list of numbers")
        return [number(key, entry, 1e-6, 1e31) for entry in value]
    return value


def _powers(base: float, dim: int) -> np.ndarray:
    """base ** (2 i / dim), float32 `[dim / 2]`, rounded from float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return portable.power(base, exponents).astype(np.float32)


def _default(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    return Rope(1.0 / _powers(p["rope_theta"], dim))


def _linear(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    return Rope(1.0 / _powers(p["rope_theta"], dim) / p["factor"])


def _proportional(
    p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int
) -> Rope:
    """The first part of the pairs of all numbers of a head rotate, the others do not (Gemma 4)."""
    count = int(p.get("partial_rotary_factor", 1.0) * dim // 2)
    frequencies = 1.0 / _powers(p["rope_theta"], dim) / p.get("factor", 1.0)
    frequencies[count:] = 0.0
    return Rope(frequencies.astype(np.float32))


def _dynamic(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    factor, length = p["factor"], max(max_positions, trained_positions)
    base_factor = (factor * length / trained_positions) - (factor - 1)
    stretch = float(portable.power(base_factor, dim / (dim - 2)))
    return Rope(1.0 / _powers(p["rope_theta"] * stretch, dim))


def _ntk_alpha(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    stretch = float(portable.power(p["alpha"], dim / (dim - 2)))
    return Rope(1.0 / _powers(p["rope_theta"] * stretch, dim))


def _yarn_mscale(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * float(portable.log(scale)) + 1.0


def _yarn(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    base, original = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p["factor"] if p.get("factor") is not None else trained_positions / original
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = p.get("mscale"), p.get("mscale_all_dim")
        attention_factor = _yarn_mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)

    def dimension(rotations: float) -> float:
        """The dimension that makes `rotations` turns over the original context."""
        turns = float(portable.log(original / (rotations * 2 * math.pi)))
        return dim * turns / (2 * float(portable.log(base)))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((np.arange(dim // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
    extrapolated = 1 - ramp
    powers = _powers(base, dim)
    return Rope(
        1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated,
        float(attention_factor),
    )


def yarn_scale(parameters: Mapping[str, Any]) -> float:
    """The factor by which DeepSeek scales queries, and keys, for the context that YaRN adds.

    Raises:
        CheckpointError: A parameter is missing or invalid.
    """
    weight = parameters.get("mscale_all_dim")
    if rope_type(parameters) == "default" or weight is None:
        return 1.0
    if parameters.get("factor") is None:
        raise ConfigError("rope scaling with 'mscale_all_dim' lacks 'factor'")
    factor = _checked_parameter("factor", parameters["factor"])
    return _yarn_mscale(factor, _checked_parameter("mscale_all_dim", weight))


def _longrope(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    name = "original_max_position_embeddings"
    original = integer(name, p[name], 2)  # its logarithm divides
    factor = p["factor"] if p.get("factor") is not None else trained_positions / original
    length = "long" if max_positions > original else "short"
    attention_factor = p.get("attention_factor")
    if p.get(f"{length}_mscale") is not None:  # PhiMoE
        attention_factor = p[f"{length}_mscale"]
    if attention_factor is None:
        attention_factor = 1.0
        if factor > 1.0:
            attention_factor = math.sqrt(1 + float(portable.log(factor) / portable.log(original)))
    factors = np.array(p[f"{length}_factor"], np.float32)
    powers = _powers(p["rope_theta"], dim)
    if factors.shape != powers.shape:
        raise ConfigError(
            f"rope scaling 'longrope' has {len(factors)} factors for {len(powers)} frequencies"
        )
    return Rope(1.0 / (factors * powers), float(attention_factor))


def _llama3(p: Mapping[str, Any], dim: int, trained_positions: int, max_positions: int) -> Rope:
    frequencies = 1.0 / _powers(p["rope_theta"], dim)
    factor, original = p["factor"], p["original_max_position_embeddings"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    if low >= high:
        raise refusal("low_freq_factor", low, f"a number less than high_freq_factor, {high:g}")
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    scaled = np.where(is_long, frequencies / factor, frequencies)
    interpolation = (original / wavelengths - low) / (high - low)
    interpolated = (1 - interpolation) * scaled / factor + interpolation * scaled
    return Rope(np.where(~is_long & ~is_short, interpolated, scaled))


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
