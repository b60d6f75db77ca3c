"""An inference engine for many decoding methods of language models.

Importing the package is fast: public names are imported from their modules on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from anydecode.errors import AnydecodeError
from anydecode.version import __version__

if TYPE_CHECKING:
    from anydecode.api.llm import LLM as LLM
    from anydecode.constraints.json.json_schema import JsonSchema as JsonSchema
    from anydecode.constraints.languages import Choice as Choice
    from anydecode.constraints.languages import Grammar as Grammar
    from anydecode.constraints.languages import Regex as Regex
    from anydecode.constraints.predicate import Predicate as Predicate

_MODULES = {
    "LLM": "anydecode.api.llm",
    "JsonSchema": "anydecode.constraints.json.json_schema",
    "Regex": "anydecode.constraints.languages",
    "Grammar": "anydecode.constraints.languages",
    "Choice": "anydecode.constraints.languages",
    "Predicate": "anydecode.constraints.predicate",
}

__all__ = [
    "LLM", "AnydecodeError", "Choice", "Grammar", "JsonSchema", "Predicate", "Regex", "__version__",
]  # fmt: skip

logging.getLogger("anydecode").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
