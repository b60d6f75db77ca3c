"""Values as plain JSON."""

from __future__ import annotations

import dataclasses
from typing import Any


def to_plain(value: Any) -> Any:
    """Convert dataclasses, tuples, sets, paths and numpy numbers to JSON types."""
    if hasattr(value, "to_dict"):
        return to_plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_plain(getattr(value, f.name)) for f in fields if f.repr}
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_plain(entry) for entry in value)
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return float(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return None
    return value.item() if hasattr(value, "item") else str(value)
