"""The names of properties and their order, and references without an end."""

from __future__ import annotations

from typing import Any

from anydecode.constraints.json.completion_hints import SchemaHints


def test_required_names_from_the_last_then_small_values() -> None:
    schema = {
        "properties": {
            "long": {"type": "string", "minLength": 40},
            "first": {},
            "short": {"type": "null"},
            "last": {},
        },
        "required": ["first", "last"],
    }
    names = {"long", "first", "short", "last"}
    assert SchemaHints(schema).ordered(names) == ["last", "first", "short", "long"]


def test_an_object_has_names_of_its_patterns() -> None:
    schema: dict[str, Any] = {"patternProperties": {r"^\d+\.\d+$": True}, "required": ["a"]}
    assert set(SchemaHints(schema).names) == {"a", "0.0"}


def test_references_without_an_end_have_a_size() -> None:
    schema = {
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"type": "string", "minLength": 99}},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    assert SchemaHints(schema).ordered({"x", "y"}) == ["x", "y"]
