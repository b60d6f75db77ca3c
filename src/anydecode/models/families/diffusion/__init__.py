"""The families of diffusion language models, one file each: its `FAMILIES` are added to the table.

What a file cannot know about its models (a block size that no config or code says) it leaves out,
and the user gives it when a model is opened.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from anydecode.models.families.family import Denoising
from anydecode.models.families.table import FAMILIES

for _found in iter_modules(__path__, f"{__name__}."):
    FAMILIES |= import_module(_found.name).FAMILIES


def diffusion_families() -> list[tuple[str, Denoising]]:
    """The keys of the families of diffusion models, and how they fill masks."""
    found = [(key, family.denoising) for key, family in FAMILIES.items()]
    return [(key, denoising) for key, denoising in found if denoising is not None]
