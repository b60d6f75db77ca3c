"""Narrowed objects have their required names and no others."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.constraints.json.narrowing import narrowed_schema

CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "index", "expected"),
    [
        ({"type": "object", "required": ["a"]}, 0, {"properties": {"a": True}, **CLOSED}),
        ({"type": "object"}, 0, {"properties": {}, **CLOSED}),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
            1,
            {"properties": {"b": True}, **CLOSED},
        ),
    ],
)
def test_objects_are_closed(schema: Any, index: int, expected: dict[str, Any]) -> None:
    narrow = narrowed_schema(schema, index, 80)
    found = {key: narrow.get(key) for key in ("properties", "additionalProperties")}
    assert found == expected


def test_a_number_of_properties_that_names_cannot_give_leaves_the_object_open() -> None:
    narrow = narrowed_schema({"type": "object", "required": ["a"], "minProperties": 2}, 0, 80)
    assert narrow.get("additionalProperties") is not False
