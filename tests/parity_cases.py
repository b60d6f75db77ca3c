"""The models of the parity tests, read from the tests' own parameters."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

MODELS = Path(__file__).parent / "models"


@cache
def parity_module(name: str) -> ModuleType:
    """The module of the tests `tests/models/<name>.py`."""
    spec = importlib.util.spec_from_file_location(f"parity_{name}", MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def first_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """The first case of each causal family of `transformers`, by the prefix of its classes."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for family, settings in parity_module("test_parity").CASES.values():
        found.setdefault(family, (family, settings))
    return found
