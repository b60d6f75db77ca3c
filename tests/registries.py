"""Imports of modules outside the package, whose registrations are forgotten afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydecode import catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.models.families.table import FAMILIES


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Within the context, modules may be imported from `folder`, which is on `sys.path`. Afterwards
    they, and what they have registered, are forgotten."""
    registries: list[dict[str, Any]] = [catalogue.entries(), load_oracle_tests(), FAMILIES]
    before = [dict(registry) for registry in registries]
    modules = set(sys.modules)
    try:
        yield
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)
        for name in set(sys.modules) - modules:
            if (folder / f"{name}.py").exists():
                del sys.modules[name]
