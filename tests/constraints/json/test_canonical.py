"""Which schemas are too large to be canonicalized, and the names of properties in canonical
ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anydecode import JsonSchema
from anydecode.benchmarks.constrained_bench import walk
from anydecode.constraints.json.canonical import MAX_CHARACTERS, MAX_CONDITIONS, canonical
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()
INTEGER = {"type": "integer"}


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


#: Schemas of objects with names of values and of patterns, and names that they allow or refuse.
NAMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "patterns": (
        {"patternProperties": {"^a": INTEGER}, "additionalProperties": False},
        ["a", "ab"],
    ),
    "several patterns": (
        {"patternProperties": {"^a": INTEGER, "^b$": INTEGER}, "additionalProperties": False},
        ["a", "ab", "b"],
    ),
    "patterns and properties": (
        {
            "properties": {"x": {}},
            "patternProperties": {"^a": INTEGER},
            "additionalProperties": False,
        },
        ["a", "ab", "x"],
    ),
    "names of one pattern": ({"propertyNames": {"pattern": "^a"}}, ["a", "ab"]),
    "names of patterns and values": (
        {"propertyNames": {"anyOf": [{"pattern": "^a"}, {"enum": ["b", "x"]}]}},
        ["a", "ab", "b", "x"],
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_allows_the_names_of_patterns_and_no_others(name: str) -> None:
    names, allowed = NAMES[name]
    condition = {"if": {"required": ["a"]}, "then": {"minProperties": 1}}
    constraint = JsonSchema({"type": "object", **names, **condition})
    texts = {key: json.dumps({key: 1}) for key in ("a", "ab", "b", "x", "y")}
    assert [key for key, text in texts.items() if walk(constraint, TOKENIZER, text)] == allowed
    assert constraint.report().checked == ()  # the mask says all of it


def test_names_of_a_pattern_leave_the_listed_properties_their_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
        "propertyNames": {"pattern": "^a"},
    }
    values = [{"ab": 1}, {"ab": "x"}, {"ac": "x"}, {"ac": 1}, {"b": "x"}]
    constraint = JsonSchema(schema)
    allowed = [walk(constraint, TOKENIZER, json.dumps(value)) for value in values]
    assert allowed == [True, False, True, False, False]
