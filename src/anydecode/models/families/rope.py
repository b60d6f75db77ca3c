"""Rotary frequencies for every scaling that `transformers` knows, by its formulas.

Two scalings, `dynamic` and `longrope`, depend there on the length of the sequence at hand, so that
the same token at the same place gets another result once the text grows. Here they depend on the
context limit the model is opened with, and on nothing else: up to the length the model was
trained for (the default limit) the results are those of `transformers`; with a longer limit,
`dynamic` uses the base for the full limit and `longrope` its long factors, from the first
position on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Rope
from anydecode.models.limits import integer, number, refusal

_ALIASES = {"su": "longrope", "mrope": "default"}


def rope_type(parameters: Mapping[str, Any]) -> str:
    """The scaling's name; "default" where there is none."""
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return _ALIASES.get(name, name)


def make_rope(
    parameters: Mapping[str, Any], head_dim: int, trained_positions: int, max_positions: int
) -> Rope:
    """Frequencies from `rope_parameters` of one layer type.

    `parameters` holds `rope_theta` and, for those scalings that need it,
    `original_max_position_embeddings`. `trained_positions` is `max_position_embeddings`;
    `max_positions` the context limit. Raises CheckpointError for unknown scalings and missing keys.
    """
    kind = rope_type(parameters)
    if kind not in _SCALINGS:
        raise CheckpointError(f"rope scaling {kind!r} is not supported")
    share = parameters.get("partial_rotary_factor")
    dim = head_dim if share is None else int(head_dim * number("partial_rotary_factor", share))
    smallest = 4 if kind == "dynamic" else 2  # its formula divides by the size less 2
    if dim % 2 or not smallest <= dim <= head_dim:
        allowed = f"an even number from {smallest} to the {head_dim} dimensions of a head"
        raise refusal("the rotary size", dim, allowed)
    checked = {k: _checked(k, value) for k, value in parameters.items() if value is not None}
    try:
        return _SCALINGS[kind](checked, dim, trained_positions, max_positions)
    except KeyError as error:
        raise CheckpointError(f"rope scaling {kind!r} lacks {error.args[0]!r}") from None


#: The least and the largest value of each parameter that is a number. Frequencies may be divided
#: by as much as 1e30, which switches them off.
_BOUNDS = {
    "rope_theta": (1.001, 1e18),
    "factor": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}


def _checked(key: str, value: Any) -> Any:
    """A parameter, if it is what its formula takes."""
    if key in _BOUNDS:
        return number(key, value, *_BOUNDS[key])
    if key == "original_max_position_embeddings":
        return integer(key, value)
    if key in ("long_factor", "short_factor"):
        if not isinstance(value, list):
            raise refusal(key, value, "a list of numbers")
        return [number(key, entry, 1e-6, 1e30) for entry in value]
    return value


def _powers(base: float, dim: int) -> torch.Tensor:
    """base ** (2 i / dim), float32 `[dim / 2]`."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers: torch.Tensor = base**exponents
    return powers


def _default(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    return Rope(1.0 / _powers(p["rope_theta"], dim))


def _linear(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    return Rope(1.0 / _powers(p["rope_theta"], dim) / p["factor"])


def _dynamic(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    factor, length = p["factor"], max(limit, trained)
    stretch = (factor * length / trained) - (factor - 1)
    return Rope(1.0 / _powers(p["rope_theta"] * stretch ** (dim / (dim - 2)), dim))


def _magnitude(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _yarn(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    base, original = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p["factor"] if p.get("factor") is not None else trained / original
    magnitude = p.get("attention_factor")
    if magnitude is None:
        top, bottom = p.get("mscale"), p.get("mscale_all_dim")
        magnitude = _magnitude(factor)
        if top and bottom:
            magnitude = _magnitude(factor, top) / _magnitude(factor, bottom)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = _powers(base, dim)
    return Rope(1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(magnitude))


def _longrope(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    name = "original_max_position_embeddings"
    original = integer(name, p[name], 2)  # its logarithm divides
    factor = p["factor"] if p.get("factor") is not None else trained / original
    magnitude = p.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0
        if factor > 1.0:
            magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = torch.tensor(p["long_factor" if limit > original else "short_factor"])
    powers = _powers(p["rope_theta"], dim)
    if factors.shape != powers.shape:
        raise CheckpointError(
            f"rope scaling 'longrope' has {len(factors)} factors for {len(powers)} frequencies"
        )
    return Rope(1.0 / (factors.to(torch.float32) * powers), float(magnitude))


def _llama3(p: Mapping[str, Any], dim: int, trained: int, limit: int) -> Rope:
    frequencies = 1.0 / _powers(p["rope_theta"], dim)
    factor, original = p["factor"], p["original_max_position_embeddings"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    if low >= high:
        raise refusal("low_freq_factor", low, f"a number less than high_freq_factor, {high:g}")
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(is_long, frequencies / factor, frequencies)
    share = (original / wavelengths - low) / (high - low)
    between = (1 - share) * scaled / factor + share * scaled
    return Rope(torch.where(~is_long & ~is_short, between, scaled))


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
