"""Finds the family of a config: by the names of its classes, then by its model type.

The names of the classes come first because different models share a model type (LLaDA and
LLaDA-MoE, Qwen3 and Efficient-DLM).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from anydecode.models.families.table import FAMILIES, GROUP
from anydecode.models.families.values import Config, list_value, mapping_value


def class_names(config: Config) -> list[str]:
    """The names of the classes that read the checkpoint: `architectures`, and the models of the
    repository's own code (`auto_map`)."""
    names = list(list_value(config, "architectures", str) or ())
    for key, value in mapping_value(config, "auto_map").items():
        if key.startswith("AutoModel") and isinstance(value, str):
            names.append(value.rpartition(".")[2])
    return names


def find_family(config: Config, model_type: Any) -> str | None:
    """The key of a config's family in `FAMILIES`; None if there is none.

    `model_type` is that of the config, or of the config of which it is a part.
    """
    names = set(class_names(config))
    # Families of causal models share the names of classes, so only those of diffusion models, and
    # families that know their configs, are found by them.
    found = [
        key
        for key, family in FAMILIES.items()
        if (family.denoising or (family.is_own and family.is_own(config)))
        and names & set(family.architectures)
    ]
    if not found and isinstance(model_type, str):
        _add_offered(model_type)
        found = [
            key
            for key, family in FAMILIES.items()
            if model_type == key or model_type in family.model_types
        ]
    return min(found, key=lambda key: _rank(config, model_type, key), default=None)


def _rank(config: Config, model_type: Any, key: str) -> int:
    """How well a family that has the config's classes or its model type fits: less is better."""
    is_own = FAMILIES[key].is_own
    if is_own is not None:
        return 0 if is_own(config) else 3
    return 1 if key == model_type else 2


def _add_offered(model_type: str) -> None:
    """Add the family of this name that another package offers, if there is one."""
    if model_type not in FAMILIES:
        for point in entry_points(group=GROUP, name=model_type):
            FAMILIES[model_type] = point.load()
