"""Narrowed schemas: closed objects, one alternative, and short arrays."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import JsonSchema
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.shortest_completion import shortest_completion
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()

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


def test_alternatives_are_chosen_in_turn_with_all_properties_and_then_the_required_ones() -> None:
    array = {"type": "array", "items": {"type": "string", "minLength": 3}}
    value = {"type": "null"}
    open_object = {"type": "object", "properties": {"a": value, "b": value}, "required": ["a"]}
    chosen = [
        narrowed_schema({"anyOf": [array, open_object]}, index, 80)["allOf"] for index in range(5)
    ]
    whole, required = {**open_object, **CLOSED}, {**open_object, "properties": {"a": value}}
    assert chosen == [[array], [array], [whole], [{**required, **CLOSED}], [array]]


def test_items_that_must_differ_have_different_values() -> None:
    array = {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}
    for index, first in ((0, [1, 3, 5]), (1, [2, 4])):
        narrow = narrowed_schema({**array, "minItems": 2}, index, 80)
        values = [one["enum"] for one in narrow["prefixItems"]]
        assert values[0] == first and sorted(sum(values, [])) == [1, 2, 3, 4, 5]
        assert narrow["items"] is False and narrow["maxItems"] == 2
    for other in ({"minItems": 1}, {"minItems": 2, "uniqueItems": False}):
        assert "prefixItems" not in narrowed_schema({**array, **other}, 0, 80)


@pytest.mark.parametrize(
    ("bounds", "length"),
    [({}, 1), ({"minContains": 3}, 3), ({"minContains": 2, "minItems": 5}, 5)],
)
def test_an_array_has_as_many_matching_items_as_it_needs(
    bounds: dict[str, int], length: int
) -> None:
    item = {"type": "integer"}
    narrow = narrowed_schema({"type": "array", "contains": item, **bounds}, 0, 80)
    assert (narrow["items"], narrow["minItems"], narrow["maxItems"]) == (item, length, length)


def _every(item: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": f"#/$defs/{item}"}}


def _some(item: str) -> dict[str, Any]:
    return {"type": "array", "contains": {"$ref": f"#/$defs/{item}"}}


ITEMS = {"few": {"type": "integer", "multipleOf": 7}, "big": {"type": "number", "minimum": 50}}
LISTS = {
    "few": {"type": "array", "contains": {"$ref": "#/$defs/few_numbers"}},
    "big": {"type": "array", "contains": {"$ref": "#/$defs/big_numbers"}},
    "few_numbers": {"type": "array", "contains": ITEMS["few"]},
    "big_numbers": {"type": "array", "items": ITEMS["big"]},
}


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "oneOf": [{"anyOf": [_every("few"), _some("big")]},
         {"anyOf": [_every("big"), _some("few")]}], "$defs": LISTS},
        {"allOf": [_some("few"), {"not": _every("few")}, {"not": _some("big")}], "$defs": ITEMS},
        {"allOf": [_some("few"), _some("big"), {"contains": {"type": "null"}, "minItems": 5}],
         "$defs": ITEMS},
        {"allOf": [_some("few"), {"contains": {"type": "null"}, "maxItems": 3, "minItems": 2,
         "items": {"type": ["integer", "null"], "minimum": 1}}], "$defs": ITEMS},
    ],
    ids=["only one of lists", "not every item", "several items", "items"],
)  # fmt: skip
def test_the_shortest_array_of_a_narrowed_form_is_valid(schema: dict[str, Any], index: int) -> None:
    constraint = JsonSchema(schema)
    narrow = constraint.narrowed(index)
    assert narrow is not None
    state = narrow.start(TOKENIZER, TOKENIZER.vocab_size)
    tokens = shortest_completion(state, TOKENIZER, narrow.completion_hints)
    assert tokens is not None
    assert constraint.is_valid(TOKENIZER.decode(tokens[:-1]))
