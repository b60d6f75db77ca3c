"""Witnesses: properties that an object must have although its schema does not name them."""

from __future__ import annotations

import json
import re
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydecode import JsonSchema
from anydecode.constraints.json.checking import Validator
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.shortest_completion import shortest_completion
from anydecode.constraints.json.witnesses import matching_texts, search_expression, witnesses
from anydecode.models.scripted import ByteTokenizer


def with_name(pattern: str) -> dict[str, Any]:
    """A schema that requires some property name to match `pattern`."""
    return {"not": {"propertyNames": {"not": {"pattern": pattern}}}}


#: Objects that must have properties their schema does not name, and the number of witnesses.
WITNESSED: list[tuple[dict[str, Any], int]] = [
    ({"type": "object", "allOf": [with_name("4"), with_name(r"\w3")], "maxProperties": 1}, 1),
    ({"type": "object", "allOf": [*map(with_name, "abc"), {"propertyNames": {"pattern": "^..$"}}],
      "maxProperties": 2}, 2),
    ({"type": "object", "not": {"propertyNames": {"not": {"enum": ["x", "y"]}}},
      "patternProperties": {"^[xy]$": {"type": "integer"}}, "minProperties": 3}, 3),
    ({"type": "object", "oneOf": [{"patternProperties": {"a": {"multipleOf": 10, "maximum": 35}}},
                                  {"patternProperties": {"a": {"multipleOf": 10, "maximum": 40}}}]},
     1),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "count"), WITNESSED)
def test_narrowed_objects_have_the_properties_that_negations_require(schema, count) -> None:
    tokenizer = ByteTokenizer()
    validator = Validator(schema, len(json.dumps(schema)), {})
    for number in range(4):
        smaller = narrowed_schema(schema, number, len(json.dumps(schema)))
        assert len(smaller["required"]) == count
        state = JsonSchema(smaller).start(tokenizer, tokenizer.vocab_size)
        end = shortest_completion(state, tokenizer)
        assert validator.is_valid(json.loads(tokenizer.decode(end)))


def test_objects_without_the_required_witnesses_are_invalid() -> None:
    for schema, _ in WITNESSED[:3]:
        validator = Validator(schema, len(json.dumps(schema)), {})
        assert not validator.is_valid({"other": 1}) and not validator.is_valid({})


def test_no_witness_is_returned_if_no_name_exists() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]$"},
        **with_name("a"),
    }
    assert witnesses(schema, 0) == []
    assert witnesses({"type": "object", "minProperties": 2}, 0) == []
    assert witnesses({"type": "object", **with_name("a(?=b)")}, 0) == []  # not regular


_PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", r"\d", ".", "c"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        inner.map(lambda one: f"({one})*"),
        inner.map(lambda one: f"({one})?"),
        inner.map(lambda one: f"({one}){{1,2}}"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_PATTERNS, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_matching_texts_match_all_patterns_and_the_shortest_is_found(
    patterns: list[str], starts: bool, ends: bool
) -> None:
    patterns = [f"{'^' * starts}({one}){'$' * ends}" for one in patterns]
    found = list(islice(matching_texts([search_expression(one) for one in patterns]), 20))
    assert [len(text) for text in found] == sorted(map(len, found))
    assert all(re.search(one, text) for one in patterns for text in found)
    short = [
        text
        for count in (1, 2, 3)
        for text in map("".join, product("abc1", repeat=count))
        if all(re.search(one, text) for one in patterns)
    ]
    assert bool(found) or not short  # found if a text of three characters matches
    assert not short or len(found[0]) <= len(short[0])
