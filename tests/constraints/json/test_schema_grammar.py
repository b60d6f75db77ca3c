"""Grammars of JSON Schemas for canvases: every short text against a validator of schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, permutations, product
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from anydecode import JsonSchema
from anydecode.constraints.grammar.automata import partitioned
from anydecode.constraints.grammar.byte_grammar import ByteGrammar
from anydecode.constraints.grammar.byte_regex import characters, literal, read_regex, repeated
from anydecode.constraints.grammar.canvas_grammar import CanvasGrammar
from anydecode.constraints.json import schema_grammar
from anydecode.constraints.json.schema_grammar import canvas_grammar_of
from anydecode.constraints.json.witnesses import search_expression
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer


def accepts(grammar: ByteGrammar) -> Callable[[str], bool]:
    """Whether a text is one of the grammar."""
    tokens: Any = SimpleNamespace(token_bytes=[bytes([byte]) for byte in range(256)], size=256)
    canvas = CanvasGrammar(grammar, tokens, frozenset())
    return lambda text: canvas.is_completable([*text.encode()])


def of_schema(schema: Any) -> Callable[[str], bool]:
    tokenizer = ByteTokenizer()
    state: Any = JsonSchema(schema).start(tokenizer, tokenizer.vocab_size)
    return accepts(canvas_grammar_of(state.origin))


def words(alphabet: str, longest: int) -> Iterator[str]:
    return ("".join(one) for size in range(longest + 1) for one in product(alphabet, repeat=size))


NUMBERS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "multipleOf": 3},
    {"type": "integer", "multipleOf": 7, "minimum": -20, "exclusiveMaximum": 35},
    {"type": "integer", "exclusiveMinimum": -1.5, "exclusiveMaximum": 12.5},
    {"type": "number", "multipleOf": 0.25},
    {"type": "number", "multipleOf": 1.5, "maximum": 20},
    {"type": "number", "multipleOf": 20},
    {"type": "number", "minimum": 1.25, "maximum": 20.5},
    {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 1.52},
    {"type": "number", "minimum": -1.5, "exclusiveMinimum": -1.5, "maximum": -0.2},
    {"type": "number", "minimum": 2, "exclusiveMinimum": 2},
)


def is_number(schema: dict[str, Any], text: str) -> bool:
    """The rule in fractions, of the texts that a number is written as here."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text):
        return False
    if schema["type"] == "integer" and ("." in text or text == "-0"):
        return False
    value = Fraction(text)
    bounds = {key: Fraction(str(bound)) for key, bound in schema.items() if key != "type"}
    return (
        value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < bounds["exclusiveMaximum"])
        and (value / bounds.get("multipleOf", value or 1)).denominator == 1
    )


def wrong_numbers(schema: dict[str, Any]) -> int:
    allowed, found = of_schema(schema), set()
    wrong = 0
    for text in words("-0125.", 5):
        expected = is_number(schema, text)
        found.add(expected)
        wrong += allowed(text) != expected
    assert found == {True, False}
    return wrong


@pytest.mark.parametrize("schema", NUMBERS, ids=str)
def test_numbers_are_those_within_the_bounds_that_are_multiples(schema: dict[str, Any]) -> None:
    assert wrong_numbers(schema) == 0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_multiples", lambda step, real: real(step * 2)),
        ("_above", lambda decimals, with_equal, real: real(decimals, True)),
        ("_below", lambda decimals, with_equal, real: real(decimals, True)),
    ],
)
def test_wrong_numbers_are_detected(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(schema_grammar, name)
    monkeypatch.setattr(schema_grammar, name, lambda *given: wrong(*given, real))
    assert sum(wrong_numbers(NUMBERS[index]) for index in (0, 7, 9)) > 0


def test_a_step_with_too_many_remainders_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"multipleOf 5003, which has too many"):
        of_schema({"type": "number", "multipleOf": 5003})
    assert of_schema({"type": "number", "multipleOf": 1e-8})("0.00000003")


STRINGS: tuple[dict[str, Any], ...] = (
    {"pattern": "^a*b", "minLength": 2, "maxLength": 3},
    {"pattern": 'a"', "maxLength": 3},
    {"pattern": "^a|b$"},
    {"pattern": "^(a|^b$|b$)"},
    {"pattern": "(^|a)b($|é)", "minLength": 1},
    {"pattern": "^$|aa"},
    {"pattern": "é", "minLength": 2, "maxLength": 2},
    {"format": "ipv6", "maxLength": 3},
    {"format": "duration", "pattern": "4", "maxLength": 4},
)


def wrong_strings(schema: dict[str, Any]) -> int:
    schema = {"type": "string", **schema}
    allowed, wrong, found = of_schema(schema), 0, set()
    validator = jsonschema.Draft202012Validator(schema)
    for text in words({"ipv6": ":1", "duration": "P4TM"}.get(schema.get("format"), 'ab"é'), 4):
        expected = validator.is_valid(text)
        if "format" in schema:
            short = re.fullmatch("::1?|1::" if "ipv6" in schema["format"] else
                                 "P(T?4+M(T4+M)?)", text)  # fmt: skip
            expected = expected and short is not None
        found.add(expected)
        wrong += allowed(json.dumps(text, ensure_ascii=False)) != expected
    assert found == {True, False}
    return wrong


@pytest.mark.parametrize("schema", STRINGS, ids=str)
def test_strings_have_the_pattern_the_format_and_the_length(schema: dict[str, Any]) -> None:
    assert wrong_strings(schema) == 0


def test_patterns_whose_lengths_are_ignored_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_grammar, "_intersection", lambda parts: parts[0])
    assert wrong_strings(STRINGS[0]) > 0 and wrong_strings(STRINGS[7]) > 0


def test_long_strings_are_shortened_where_the_grammar_would_be_too_large() -> None:
    long = {"type": "string", "maxLength": 1500}
    one = of_schema(long)
    assert one(json.dumps("a" * 1500)) and not one(json.dumps("a" * 1501))
    properties = {name: long for name in ("a", "b", "c", "d")}
    several = of_schema({"type": "object", "properties": properties, "additionalProperties": False})
    assert several(json.dumps({"a": "x" * 200, "d": "é" * 200}, ensure_ascii=False))
    assert not several(json.dumps({"a": "x" * 201}))
    short = {**long, "minLength": 1400}
    with pytest.raises(ConstraintError, match="too large"):
        of_schema({"type": "object", "properties": dict.fromkeys(properties, short)})


def test_anchors_of_the_first_and_last_alternative_alone_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        schema_grammar, "search_expression", lambda pattern: read_regex(pattern.strip("^$"))
    )
    assert wrong_strings(STRINGS[2]) > 0


@pytest.mark.parametrize(
    "pattern", ["^a|b$", "a$|^$", "(^a){2}|b^|$b|ab", "^^a$$", "\\^|\\$", "[$^]"]
)
def test_anchors_anywhere_in_a_pattern(pattern: str) -> None:
    allowed = accepts(ByteGrammar({"": search_expression(pattern)}))
    dotted = re.compile(pattern.replace("$", r"\Z") if pattern[0] not in "\\[" else pattern)
    for text in words("ab^$", 3):
        assert allowed(text) == (dotted.search(text) is not None), text


OBJECTS: tuple[dict[str, Any], ...] = (
    {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
    {"patternProperties": {"^a": {"type": ["integer", "null"]}, "b$": {"enum": [1, "x"]}},
     "additionalProperties": False},
    {"properties": {"a": {"minimum": 1}}, "patternProperties": {"a": {"type": "integer"}}},
    {"properties": {"a": True, "b": True}, "required": ["b"], "additionalProperties": False,
     "patternProperties": {"é": {"type": "null"}, "^b$": {"type": ["null", "string"]}}},
    {"minProperties": 1, "maxProperties": 2},
    {"maxProperties": 0},
    {"properties": {"a": {"type": "integer"}, "b": {}, "ab": {}}, "minProperties": 2,
     "additionalProperties": False},
    {"properties": {"a": {}, "b": {}}, "required": ["b"], "maxProperties": 2,
     "additionalProperties": {"type": "integer"}},
    {"properties": {"b": {}}, "minProperties": 2, "additionalProperties": {"type": "integer"}},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["b"]}]},
    {"required": ["a"], "anyOf": [{"maxProperties": 1}, {"properties": {"a": {"const": "x"}}}]},
    {"$defs": {"named": {"required": ["a"]}}, "$ref": "#/$defs/named", "maxProperties": 2,
     "x-note": ["an unknown keyword"]},
)  # fmt: skip


def wrong_objects(schema: dict[str, Any]) -> int:
    """The number of objects judged wrongly: valid ones of which no order of the properties is
    allowed, and invalid ones of which one is."""
    schema = {"type": "object", **schema}
    allowed, wrong, found = of_schema(schema), 0, set()
    validator = jsonschema.Draft202012Validator(schema)
    for length in range(4):
        for names in combinations(("a", "b", "ab", "é"), length):
            for values in product((0, 1, None, "x"), repeat=length):
                pairs = [*zip(names, values, strict=True)]
                texts = [json.dumps(dict(one), ensure_ascii=False) for one in permutations(pairs)]
                expected = validator.is_valid(dict(pairs))
                found.add(expected)
                wrong += any(map(allowed, texts)) != expected
    assert found == {True, False}
    return wrong


@pytest.mark.parametrize("schema", OBJECTS, ids=str)
def test_objects_are_those_that_are_valid(schema: dict[str, Any]) -> None:
    assert wrong_objects(schema) == 0


def test_members_that_are_not_counted_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = schema_grammar._SchemaRules._members

    def uncounted(self: Any, pairs: Any, extra: Any, lowest: int, highest: int | None) -> Any:
        return real(self, pairs, extra, 0, None)

    monkeypatch.setattr(schema_grammar._SchemaRules, "_members", uncounted)
    assert all(wrong_objects(OBJECTS[index]) > 0 for index in (4, 6, 8))


def test_names_of_which_one_pattern_counts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_grammar._SchemaRules, "_all_of", lambda self, schemas: schemas[0])
    assert wrong_objects(OBJECTS[1]) > 0 and wrong_objects(OBJECTS[2]) > 0


ARRAYS: tuple[dict[str, Any], ...] = (
    {"items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
    {"items": {"const": 2}, "maxItems": 0},
    {"items": {"const": 2}, "minItems": 3},
    {"prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1},
    {"prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2},
    {"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 3},
    {"prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1},
    {"prefixItems": [{"const": 1}, {"const": 2}, {"const": 1}], "items": {"const": 2}},
)


@pytest.mark.parametrize("schema", ARRAYS, ids=str)
def test_arrays_are_those_that_are_valid(schema: dict[str, Any]) -> None:
    schema = {"type": "array", **schema}
    allowed, validator = of_schema(schema), jsonschema.Draft202012Validator(schema)
    found = set()
    for length in range(5):
        for items in product((1, 2), repeat=length):
            expected = validator.is_valid([*items])
            found.add(expected)
            assert allowed(json.dumps(items)) == expected, items
    assert found == {True, False}


def test_a_recursive_schema_beside_other_keywords() -> None:
    allowed = of_schema(
        {
            "$defs": {"tree": {"type": "object", "properties": {"a": {
                "$ref": "#/$defs/tree", "minProperties": 1}}}},
            "$ref": "#/$defs/tree",
        }
    )  # fmt: skip
    assert allowed("{}") and allowed('{"a":{"b":1}}') and allowed('{"a":{"a":{"x":{}}}}')
    assert not allowed('{"a":{}}') and not allowed('{"a":{"a":{}}}')
    tree = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}}
    named = {"$ref": "#/$defs/tree", "required": ["b"]}
    allowed = of_schema(
        {"$defs": {"tree": tree}, "allOf": [named, {"anyOf": [{"minProperties": 2}, named]}]}
    )
    assert allowed('{"a":{},"b":1}') and allowed('{"b":1}')
    assert not allowed('{"a":{}}') and not allowed('{"a":1,"b":1}')


def test_texts_are_divided_by_what_matches_them() -> None:
    parts = ["a+", "[ab]*b", "(ab|c)*"]
    base = repeated(characters([(97, 99)]), 0, 3)
    divided = {
        matching: accepts(ByteGrammar({"": texts}))
        for matching, texts in partitioned(base, [*map(read_regex, parts)]).items()
    }
    seen = set()
    for text in words("abcd", 4):
        expected = frozenset(i for i, one in enumerate(parts) if re.fullmatch(one, text))
        found = [matching for matching, allowed in divided.items() if allowed(text)]
        is_base = re.fullmatch("[abc]{0,3}", text) is not None
        assert found == ([expected] if is_base else []), text
        seen |= {*found}
    assert seen == {*divided} and len(seen) > 4
    assert partitioned(literal("d"), [read_regex("a")]).keys() == {frozenset()}
    with pytest.raises(ConstraintError, match="too large"):
        partitioned(read_regex("(a{97})*"), [read_regex("(a{89})*"), read_regex("(a{83})*")])


def test_a_bound_that_a_double_holds_is_exact() -> None:
    allowed = of_schema({"type": "number", "minimum": 0.1})
    assert allowed("0.1") and allowed("0.100") and not allowed("0.0999999999999999999")
    assert Decimal("0.0999999999999999999") < Decimal("0.1")
