"""Recursive schemas: which of them have a finite value."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.constraints.json.termination import cannot_terminate

ENDLESS = {"$ref": "#/$defs/endless"}
DEFINITIONS = {
    "endless": {"type": "object", "properties": {"next": ENDLESS}, "required": ["next"]},
    "list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]},
}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        (ENDLESS, True),
        ({"$ref": "#/$defs/list"}, False),
        ({"anyOf": [ENDLESS, {"type": "null"}]}, False),
        ({"allOf": [ENDLESS, {"type": "object"}]}, True),
        ({"type": ["object", "null"], "properties": {"a": ENDLESS}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": ENDLESS}}, False),
        ({"type": "array", "items": ENDLESS}, False),
        ({"type": "array", "items": ENDLESS, "minItems": 1}, True),
        # The first item is another one, so that one item needs no endless one, and two do.
        ({"type": "array", "prefixItems": [{}], "items": ENDLESS, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": ENDLESS, "minItems": 2}, True),
        ({"type": "array", "prefixItems": [{}, ENDLESS], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}, ENDLESS], "minItems": 2}, True),
    ],
)
def test_a_schema_is_endless_if_every_value_needs_itself(
    schema: dict[str, Any], endless: bool
) -> None:
    assert cannot_terminate({**schema, "$defs": DEFINITIONS}) == endless
