"""Families that differ from another one in a few properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.family import Denoising, Family
from anydecode.models.families.table import FAMILIES


def family_like(like: str, *architectures: str, **changes: Any) -> Family:
    """A family with the properties of another one, but for its classes and model types.

    Args:
        like: The key of the other family.
        *architectures: Its values of `architectures`.
        **changes: Other properties that differ.
    """
    own = {"architectures": architectures, "model_types": (), **changes}
    return replace(FAMILIES[like], **own)


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
    return family_like(like, *architectures, causal=causal, denoising=denoising, **changes)
