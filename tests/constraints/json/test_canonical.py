"""Which schemas are too large to be canonicalized."""

from __future__ import annotations

from typing import Any

from anydecode.constraints.json.canonical import MAX_CHARACTERS, MAX_CONDITIONS, canonical


def with_conditions(count: int) -> dict[str, Any]:
    parts = [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(count)]
    return {"type": "object", "allOf": parts}


def test_long_schemas_stay_as_they_are() -> None:
    assert canonical({"type": "string"}, MAX_CHARACTERS) is not None
    assert canonical({"type": "string"}, MAX_CHARACTERS + 1) is None


def test_schemas_with_many_conditions_stay_as_they_are() -> None:
    assert canonical(with_conditions(2), 100) is not None
    assert canonical(with_conditions(MAX_CONDITIONS + 1), 100) is None
    nested = {"properties": {"x": with_conditions(MAX_CONDITIONS + 1)}}
    assert canonical(nested, 100) is None


def test_schemas_with_bounds_that_no_double_equals_stay_as_they_are() -> None:
    number = {"type": "number", "multipleOf": 0.1}
    assert canonical({**number, "exclusiveMinimum": -1000.0}, 100) is not None
    assert canonical({**number, "exclusiveMinimum": -1e17}, 100) is None  # -99999999999999999.9
