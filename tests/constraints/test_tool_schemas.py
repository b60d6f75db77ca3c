"""The constraint and the parser of a tool-call format agree for every schema: a text that the
constraint allows is a call, with valid arguments if the constraint's validator accepts them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

pytest.importorskip("llguidance")

from anydecode.constraints.constraint import ConstraintState  # noqa: E402
from anydecode.constraints.json.json_schema import JsonSchema  # noqa: E402
from anydecode.constraints.json.shortest_completion import shortest_completion  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.constraints.tools.stream import TextStream  # noqa: E402
from anydecode.constraints.tools.tagged import TaggedCalls  # noqa: E402
from anydecode.constraints.tools.tool_calls import ToolCalls  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402

TOKENIZER = ByteTokenizer()
TAGGED = [name for name, one in TOOL_FORMATS.items() if isinstance(one, TaggedCalls)]
SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 1, "pattern": "^[a-c]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "not": {"const": "a"}},
    {"type": ["string", "null"]},
    {"type": ["string", "integer"]},
    {"type": "number", "multipleOf": 3},
    {"type": "null"},
    {"type": "boolean"},
    {"enum": ["a", "b"]},
    {"enum": ["a", 1]},
    {"enum": ["a", None]},
    {"enum": ["true", "1"]},
    {"enum": [[], "x", {"a": 1}]},
    {"const": "null"},
    {"const": None},
    {"const": 1.5},
    {"minLength": 2},
    {"not": {"type": "integer"}},
    {"$ref": "#/$defs/short"},
    {"$ref": "#/$defs/either"},
    {},
]
DEFINITIONS = {
    "short": {"type": "string", "maxLength": 2},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
}


def random_value(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """The schema of a value."""
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {rng.choice(["anyOf", "oneOf"]): parts(rng.randint(1, 3))},
        lambda: {"allOf": parts(rng.randint(1, 2))},
        lambda: {"type": "array", "items": parts(1)[0], "maxItems": 2, "uniqueItems": True},
        lambda: random_object(rng, ["p", "q"], depth + 1),
        lambda: dict(zip(("if", "then", "else"), parts(3), strict=True)),
        lambda: {**rng.choice(SCALARS), "not": rng.choice(SCALARS)},
    ]

    def parts(count: int) -> list[dict[str, Any]]:
        return [random_value(rng, depth + 1) for _ in range(count)]

    is_scalar = depth > 2 or rng.random() < 0.5
    return dict(rng.choice(SCALARS)) if is_scalar else rng.choice(makers)()


def random_object(rng: random.Random, names: Sequence[str], depth: int = 0) -> dict[str, Any]:
    properties = {name: random_value(rng, depth) for name in names if rng.random() < 0.8}
    required = [name for name in properties if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def random_tool(rng: random.Random) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    conditions: list[dict[str, Any]] = [
        {},
        {"not": {"required": ["y"]}},
        {"oneOf": [{"required": ["x"]}, {"required": ["y"]}]},
        {"if": {"required": ["x"]}, "then": {"properties": {"x": random_value(rng)}}},
        {"anyOf": [{"properties": {"x": {"type": kind}}} for kind in ("string", "integer")]},
        {"allOf": [{"properties": {"z": random_value(rng)}}]},
    ]
    tool = random_object(rng, ["x", "y", "zed"]) | rng.choice(conditions)
    return {**tool, "$defs": DEFINITIONS}


def tool_calls(schema: dict[str, Any], format_name: str) -> ToolCalls:
    schemas = {"f": JsonSchema(schema, whitespace=None)}
    return ToolCalls(schemas, TOOL_FORMATS[format_name], is_required=True, is_parallel=False)


def random_text(
    rng: random.Random, state: ConstraintState, constraint: ToolCalls, num_tokens: int
) -> str | None:
    """A text that `state` allows: `num_tokens` random characters, and the shortest completion."""
    tokens: list[int] = []
    for _ in range(num_tokens):
        mask = state.mask()
        assert mask is not None
        allowed = [token for token in np.flatnonzero(mask[:127]).tolist() if token >= 32]
        marks = [token for token in allowed if chr(token) in '<>[]{}"/,:ntf01a']
        if not allowed:
            break
        tokens.append(rng.choice(marks if marks and rng.random() < 0.6 else allowed))
        state.advance(tokens[-1])
    completion = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    return None if completion is None else bytes([*tokens, *completion[:-1]]).decode()


def is_accepted(constraint: ToolCalls, text: str) -> bool:
    """Whether the constraint's validator accepts a text."""
    validator = constraint.incremental_validator(TOKENIZER)
    if validator is None:
        return True
    return all(validator.push(byte) is None for byte in text.encode()) and validator.end() is None


def parsed(constraint: ToolCalls, parts: Sequence[str]) -> tuple[str, list[str], bool]:
    """The content, the arguments of each call, and whether the last one is complete."""
    stream = TextStream()
    steps = constraint.parse(stream)
    content, calls, is_complete = "", [], False
    for index, part in enumerate(parts):
        for kind, value in stream.run(steps, part, final=index == len(parts) - 1):
            is_complete = kind == "end"
            if kind == "content":
                content += value
            elif kind == "call":
                calls.append("")
            elif kind == "arguments":
                calls[-1] += value
    return content, calls, is_complete


def check_text(constraint: ToolCalls, schema: dict[str, Any], text: str, cuts: list[int]) -> None:
    """Checks a text that the constraint, or a narrowed form of it, allows."""
    whole = parsed(constraint, [text])
    pieces = [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]
    assert whole == parsed(constraint, list(text)) == parsed(constraint, pieces), text
    content, calls, is_complete = whole
    assert not content.strip() and len(calls) == 1 and is_complete, text
    arguments = json.loads(calls[0])
    if is_accepted(constraint, text):
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(arguments)


def states(constraint: ToolCalls) -> Iterator[ConstraintState]:
    """The states at the start of a text, of the constraint and of narrowed forms that exist."""
    yield constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    for index in range(3):
        narrowed = constraint.narrowed(index)
        if narrowed is None:
            return
        try:
            yield narrowed.with_prefix("").start(TOKENIZER, TOKENIZER.vocab_size)
        except ConstraintError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_texts_of_random_schemas_are_parsed_as_valid_calls(format_name: str) -> None:
    num_texts = 0
    for seed in range(12):
        rng = random.Random(seed)
        schema = random_tool(rng)
        constraint = tool_calls(schema, format_name)
        try:
            all_states = [*states(constraint)]
        except ConstraintError:  # no value can satisfy the schema
            continue
        for state in all_states:
            for num_tokens in (5, 60):
                text = random_text(rng, state.fork(), constraint, num_tokens)
                if text is not None:
                    cuts = [rng.randrange(len(text)) for _ in range(3)]
                    check_text(constraint, schema, text, cuts)
                    num_texts += 1
    assert num_texts > 10


#: Schemas of one argument: a narrowed form or a keyword may say something else about its type.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "an alternative is text": {
        "anyOf": [{"type": "string", "not": {"const": "a"}}, {"type": "integer"}]
    },
    "an alternative is no text": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "null": {"const": None},
    "the text null": {"const": "null"},
    "null or a text": {"enum": [None, "b"]},
    "values of which some are no text": {"type": "string", "enum": [1, "a", None]},
}


@pytest.mark.parametrize("format_name", TAGGED)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_values_are_written_as_the_parser_reads_them(name: str, format_name: str) -> None:
    properties = {"x": ARGUMENTS[name]}
    schema = {"type": "object", "properties": properties, "required": ["x"]}
    constraint = tool_calls(schema, format_name)
    for state in states(constraint):
        text = random_text(random.Random(0), state, constraint, 0)
        assert text is not None
        check_text(constraint, schema, text, [3])


@pytest.mark.parametrize("format_name", [*TAGGED, "gemma4", "functiongemma"])
def test_a_string_without_quotes_is_completed(format_name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    constraint = tool_calls(schema, format_name)
    whole = constraint.call_format.render([("f", {"x": 'so "]'})], {"f": schema})
    state = constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    for byte in whole[: whole.index("]") + 1].encode():
        state.advance(byte)
    completion = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    assert completion is not None
    assert bytes(completion[:-1]).decode() == whole[whole.index("]") + 1 :]


@pytest.mark.parametrize("format_name", TAGGED)
def test_the_text_null_is_a_string_where_null_is_not_allowed(format_name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    constraint = tool_calls(schema, format_name)
    text = constraint.call_format.render([("f", {"x": "null"})], {"f": schema})
    assert parsed(constraint, [text]) == ("", ['{"x": "null"}'], True)
