"""Families that differ from another one in a few properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.family import Denoising, Family
from anydecode.models.families.table import FAMILIES


def diffusion_family(
    like: str, *architectures: str, denoising: Denoising, causal: bool = False, **changes: Any
) -> Family:
    """A family of diffusion models.

    Args:
        like: The key of the family whose layers it has.
        *architectures: Its values of `architectures`.
        denoising: How its models fill masks.
        causal: Whether its rows attend to earlier ones only.
        **changes: Other properties that differ.
    """
    own = {"architectures": architectures, "model_types": (), **changes}
    return replace(FAMILIES[like], causal=causal, denoising=denoising, **own)
