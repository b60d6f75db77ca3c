"""Which subschemas apply to a member of a value."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.constraints.json.checking import Validator

FEW = {"maxProperties": 1}


@pytest.mark.parametrize(
    ("schema", "key", "expected"),
    [
        ({"properties": {"a": FEW}}, "a", {"#/properties/a"}),
        ({"properties": {"a": FEW}, "additionalProperties": FEW}, "a", {"#/properties/a"}),
        ({"properties": {"a": FEW}, "additionalProperties": FEW}, "b", {"#/additionalProperties"}),
        # A pattern may match the name instead.
        ({"patternProperties": {"^b": {}}, "additionalProperties": FEW}, "b", set()),
        ({"properties": {"a/b": FEW}}, "a/b", {"#/properties/a~1b"}),
        ({"items": FEW}, 3, {"#/items"}),
        ({"prefixItems": [{}, FEW], "items": FEW}, 1, {"#/prefixItems/1"}),
        ({"prefixItems": [{}, FEW], "items": FEW}, 2, {"#/items"}),
        ({"allOf": [{"items": FEW}, {}]}, 0, {"#/allOf/0/items"}),
        ({"$ref": "#/$defs/x", "items": FEW, "$defs": {"x": {"items": {}}}}, 0,
         {"#/$defs/x/items"}),
    ],
)  # fmt: skip
def test_only_what_certainly_applies_is_found(
    schema: dict[str, Any], key: str | int, expected: set[str]
) -> None:
    validator = Validator(schema, 100)
    assert validator.child(validator.root(), key) == expected
