"""Families of causal models, one file each: its `FAMILIES` are added to the table."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from anydecode.models.families.table import FAMILIES

for _found in iter_modules(__path__, f"{__name__}."):
    FAMILIES |= import_module(_found.name).FAMILIES
