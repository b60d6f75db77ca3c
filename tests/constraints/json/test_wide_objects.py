"""Objects with hundreds of optional properties."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from anydecode import JsonSchema  # noqa: E402
from anydecode.benchmarks.constrained_bench import walk  # noqa: E402
from anydecode.constraints.json.wide_objects import (  # noqa: E402
    MAX_OPTIONAL,
    with_grouped_properties,
)
from anydecode.models.scripted import ByteTokenizer  # noqa: E402

TOKENIZER = ByteTokenizer()
NUM_NAMES = 2000
NAMES = [f"name {number}" for number in range(NUM_NAMES)]
#: Names that mean something else in a pattern, a JSON text or a pointer.
ODD_NAMES = ["a.c", "(", 'q"q', "back\\slash", "ü", "~/", "line\nend", ""]


def allows(schema: Any, text: str) -> bool:
    """Whether a text is allowed, token by token, and may end."""
    return walk(JsonSchema(schema), TOKENIZER, text)


def wide(**others: Any) -> dict[str, Any]:
    properties: dict[str, Any] = {name: {"type": "integer", "title": name} for name in NAMES}
    properties |= {name: {"type": "string"} for name in ODD_NAMES}
    properties["nested"] = {"type": "object", "properties": {"a": {"type": "null"}}}
    return {"type": "object", "properties": properties, "additionalProperties": False, **others}


@pytest.mark.parametrize(
    "value, is_valid",
    [
        ({}, True),
        ({"name 1999": 1, "name 3": 2}, True),
        ({name: "text" for name in ODD_NAMES}, True),
        ({"nested": {"a": None}, "name 0": 5}, True),
        ({"name 0": "text"}, False),
        ({"name 2000": 1}, False),
        ({"abc": "text"}, False),
        ({"a.c": 1}, False),
        ({"nested": {"a": 1}}, False),
    ],
)
def test_a_mask_allows_the_values_of_a_wide_object(value: Any, is_valid: bool) -> None:
    assert allows(wide(), json.dumps(value, ensure_ascii=False)) == is_valid


def test_a_wide_object_may_have_further_properties() -> None:
    schema = wide(additionalProperties={"type": "boolean"})
    assert allows(schema, '{"name 1": 1, "name 2000": true}')
    assert not allows(schema, '{"name 1": true}')
    del schema["additionalProperties"]
    assert allows(schema, '{"name 1": 1, "name 2000": "text"}')


def test_required_properties_of_a_wide_object_are_required() -> None:
    schema = wide(required=["name 7"])
    assert not allows(schema, "{}")
    assert not allows(schema, '{"name 1": 2}')
    assert allows(schema, '{"name 7": 1, "name 1": 2}')


def test_a_name_that_comes_twice_counts_as_one_property() -> None:
    constraint = JsonSchema(wide(minProperties=2))
    constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    assert constraint.report().checked == ("minProperties at #",)


def test_references_into_a_wide_object_stay_valid() -> None:
    schema = wide()
    schema["properties"]["same/as"] = {"$ref": "#/properties/~1odd%20name"}
    schema["properties"]["/odd name"] = {"type": "boolean"}
    assert allows(schema, '{"/odd name": true, "same/as": false}')
    assert not allows(schema, '{"same/as": 1}')


def test_a_wide_object_without_groups_is_validated() -> None:
    properties = {name: {"const": number} for number, name in enumerate(NAMES)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    constraint = JsonSchema(schema)
    constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    assert "properties at #" in constraint.report().checked


def test_objects_with_fewer_properties_stay_as_they_are() -> None:
    properties = {name: {"type": "integer"} for name in NAMES[: MAX_OPTIONAL + 1]}
    schema = {"properties": properties, "required": NAMES[:1]}
    assert with_grouped_properties(schema) is schema
    assert with_grouped_properties({"properties": properties}) != {"properties": properties}
