"""Patterns from users: none takes exponential time, and too large ones are rejected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydecode import Grammar, JsonSchema, Regex
from anydecode.benchmarks.constrained_answers import judged
from anydecode.benchmarks.constrained_bench import walk
from anydecode.constraints import patterns
from anydecode.constraints.grammar import byte_grammar
from anydecode.constraints.grammar.byte_regex import EMPTY, read_regex
from anydecode.constraints.json.completion_hints import example
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.relaxing import without_assertions
from anydecode.constraints.json.witnesses import matching_texts, search_expression
from anydecode.constraints.patterns import matches
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()
#: In seconds. Not a measure of speed: a backtracking matcher would need longer than any limit.
TIMEOUT = 240
_EXPONENTIAL = "^(a+)+$"
_NAME = "a" * 64 + "!"
#: Schemas with a pattern that is matched against a name of the same schema.
HOSTILE: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"pattern": "^(?:(?=a)a+)+$"},
     "properties": {_NAME: {"type": "integer"}}},
    {"type": "object", "patternProperties": {_EXPONENTIAL: {"type": "integer"}},
     "not": {"propertyNames": {"not": {"enum": [_NAME]}}}, "maxProperties": 1},
]  # fmt: skip


def run_in_subprocess(program: str, *arguments: str) -> str:
    """The output of `program`, run in a process that is killed after `TIMEOUT`."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(HOSTILE[0], id="propertyNames"),
        pytest.param(HOSTILE[1], id="patternProperties", marks=pytest.mark.slow),
    ],
)
def test_exponential_patterns_terminate_through_the_api(schema):
    program = """
import json, sys
from anydecode import JsonSchema
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.certification.checks import scripted_llm
schema = json.loads(sys.argv[1])
with scripted_llm() as llm:
    answer = llm.generate("x: ", constraint=JsonSchema(schema), max_tokens=64, seed=0)
    narrowed_schema(schema, 0, len(sys.argv[1]))
print(answer.finish_reason)
"""
    assert run_in_subprocess(program, json.dumps(schema)).strip() in ("stop", "length")


def test_exponential_patterns_terminate_through_the_server():
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    program = """
import json, sys, httpx
from anydecode.certification.checks import scripted_llm
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
with scripted_llm() as llm, LiveServer(llm, Settings(name="scripted", port=0)) as server:
    with httpx.Client(base_url=server.url, timeout=200, trust_env=False) as http:
        for text in sys.argv[1:]:
            inner = {"name": "x", "schema": json.loads(text)}
            response_format = {"type": "json_schema", "json_schema": inner}
            body = {"prompt": "a", "response_format": response_format, "max_tokens": 32}
            answer = http.post("/v1/completions", json=body)
            print(answer.status_code, answer.json().get("error", {}).get("message", "fine"))
        print(http.get("/health").status_code)
"""
    large = {"type": "string", "pattern": "(a{1000}){1000}"}
    first, second, refused, health = run_in_subprocess(
        program, *(json.dumps(one) for one in (*HOSTILE, large))
    ).splitlines()
    assert (first, second, health) == ("200 fine", "200 fine", "200")
    assert re.fullmatch(r"400 .*the pattern '\(a\{1000\}\)\{1000\}' cannot be compiled.*", refused)


def test_large_patterns_of_schemas_are_rejected_with_one_line():
    large = [
        "(a{1000}){1000}", "((a{1000}){1000}){1000}", "(.{0,9999}){9999}", r"\p{L}{2000}",
        "(" * 1000 + "a" + ")" * 1000, "(" * 40_000, r"\s" * 20_000, "a" * 70_000,
    ]  # fmt: skip
    program = """
import sys
from anydecode import JsonSchema
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer
for pattern in map(eval, sys.argv[1:]):
    for schema in ({"type": "string", "pattern": pattern}, {"patternProperties": {pattern: True}}):
        try:
            JsonSchema(schema).start(ByteTokenizer(), 259)
            print("accepted")
        except ConstraintError as error:
            print(str(error).replace(chr(10), "LINE BREAK"))
"""
    lines = run_in_subprocess(program, *map(_short, large)).splitlines()
    assert len(lines) == 2 * len(large)
    for line in lines:
        assert "pattern" in line and len(line) < 400 and "LINE BREAK" not in line, line


def _short(pattern: str) -> str:
    """`pattern` as a Python expression that fits on a command line."""
    start = pattern[:2] if pattern[0] == "\\" else pattern[0]
    count = len(pattern) // len(start)
    if start * count == pattern:
        return f"{start!r} * {count}"
    return repr(pattern)


def test_the_size_limit_is_shared_by_all_patterns_of_a_schema(monkeypatch):
    several = {"properties": {f"p{i}": {"pattern": f"^{i}[^a]{{40}}$"} for i in range(20)}}
    JsonSchema(several).start(TOKENIZER, 259)
    monkeypatch.setattr(patterns, "MAX_TOTAL_BYTES", 20 * 1000)
    with pytest.raises(ConstraintError, match="cannot be compiled"):
        JsonSchema({**several, "title": "another"}).start(TOKENIZER, 259)


@pytest.mark.parametrize("constraint", [
    Regex("((a{1000}){1000}){1000}"),
    Regex("(" * 1000 + "a" + ")" * 1000),
    Regex("a" * 50_000, engine="xgrammar"),
    JsonSchema({"type": "string", "pattern": "a" * 50_000}, engine="xgrammar"),
    Grammar('start: A\nA: ((("a"~1000)~1000)~1000)'),
    Grammar("start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    Grammar("start: R0\n" + "".join(f'R{i}: R{i + 1} "b"\n' for i in range(5000)) + 'R5000: "a"'),
], ids=range(7))  # fmt: skip
def test_large_constraints_of_other_kinds_are_rejected_with_one_line(constraint):
    if getattr(constraint, "engine", "") == "xgrammar":
        pytest.importorskip("xgrammar")
    with pytest.raises(ConstraintError) as caught:
        state = constraint.start(TOKENIZER, 259)
        for _ in range(100):
            state.advance(ord("a"))
            state.mask()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("pattern", [
    "((a{1000}){1000}){1000}", "(" + "a+" + ")+" * 60, "(" * 60 + "a" + ")+" * 60,
    "(" * 200 + "a" + ")" * 200, "((){2000}){2000}", r"\W" * 1000, "a{" + "9" * 5000 + "}",
    "[" + r"\W" * 5000 + "]", "a++++++++" * 4 + "+" * 40,
], ids=range(9))  # fmt: skip
def test_patterns_too_large_to_expand_are_rejected_by_the_parser(pattern):
    with pytest.raises(ConstraintError, match="in the regular expression"):
        read_regex(pattern)
    assert example(pattern) is None


@pytest.mark.parametrize("sign", ["*", "+", "?", "{2}", "??"])
def test_repetitions_of_repetitions_are_limited(sign: str) -> None:
    """Walks over an expression recurse: thousands of levels would pass Python's limit."""
    read_regex("(" * 10 + "a" + ")*" * 10)
    with pytest.raises(ConstraintError, match="nested groups and repetitions|parts"):
        read_regex("a" + sign * 2000)
    with pytest.raises(ConstraintError, match="nested"):
        read_regex("(" * 60 + "a" + ")*" * 60)


def test_the_size_of_automata_is_limited():
    for pattern in ("[ab]*a[ab]{900}", "([ab]*a[ab]{30}){4}"):
        with pytest.raises(ConstraintError, match="too large"):
            byte_grammar.ByteGrammar({"": read_regex(pattern)})
    long = byte_grammar.ByteGrammar({"": read_regex("(a{1000}){15}")})
    assert len(long.transitions) == 15_001


def test_the_size_of_expanded_grammars_is_limited():
    doubling = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"'
    repeating = 'start: (("a"~2000)~2000)~2000'
    shared = (
        "start: " + "A0 " * 400 + "\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(9))
    )
    for text in (doubling, repeating, shared + 'A9: "x"'):
        with pytest.raises(ConstraintError, match="too large"):
            byte_grammar.byte_grammar(text)


def test_look_around_is_removed_from_long_patterns():
    assert without_assertions("(?=b)" * 3 + "a" * 60_000 + r"(?!c)\1") == "a" * 60_000 + r"[\s\S]*"


def test_a_pattern_that_takes_too_many_steps_does_not_match():
    assert matches("^(?=a)(a|b)*$", "a" * 50)
    hostile = r"^(?:(?=a)a+)+$"
    assert not matches(hostile, "a" * 64 + "!")
    for schema in ({"pattern": hostile}, {"not": {"pattern": hostile}}):  # neither counts as valid
        assert not JsonSchema(schema).is_valid(json.dumps("a" * 64 + "!"))


def test_answers_are_validated_without_backtracking():
    row = {"text": json.dumps({_NAME: 1})}
    program = "import json, sys\nfrom anydecode.benchmarks.constrained_answers import judged\n"
    program += "print([judged(json.loads(one), json.loads(sys.argv[1]))['valid']"
    program += " for one in sys.argv[2:]])"
    schemas = [HOSTILE[0], {"patternProperties": {_EXPONENTIAL: False}}, {"pattern": "("}]
    output = run_in_subprocess(program, json.dumps(row), *map(json.dumps, schemas))
    assert output.strip() == "[False, True, False]"
    assert judged({"type": "string", "format": "date"}, {"text": '"x"'})["valid"]


#: Cases in which ECMA-262, which JSON Schema requires, and Python differ, and others.
SEMANTICS = [
    ("b", "abc", True), ("^a", "ba", False), ("a$", "ba", True), ("^a|b$", "xb", True),
    ("^a$", "a\n", False), ("^a$", "A", False), ("^$", "", True), ("", "x", True),
    (r"^\d$", "3", True), (r"^\d$", "\u0663", False), (r"^\D$", "\u0663", True),
    (r"^\w$", "_", True), (r"^\w$", "\u00e9", False), (r"^\W$", "\u00e9", True),
    (r"^\s$", "\u00a0", True), (r"^.$", "\n", False),
    (r"^.$", "\U0001f600", True), ("^[^a]$", "\n", True), (r"^\p{L}$", "\u00e9", True),
    (r"^\u00e9$", "\u00e9", True), (r"^\/$", "/", True), (r"^\cJ$", "\n", True),
    ("^(?<n>a)$", "a", True), (r"\ba\b", "x a", True),
]  # fmt: skip


@pytest.mark.parametrize("pattern, text, expected", SEMANTICS)
def test_patterns_follow_ecma_262(pattern, text, expected):
    assert matches(pattern, text) == expected
    schema = JsonSchema({"type": "string", "pattern": pattern})
    assert schema.is_valid(json.dumps(text)) == expected
    assert walk(schema, TOKENIZER, json.dumps(text, ensure_ascii=False)) == expected


def test_property_names_are_matched_as_in_ecma_262():
    """A rewritten `propertyNames` keeps a name only if the pattern matches it."""
    schema = {"type": "object", "propertyNames": {"pattern": r"^\p{L}$"},
              "properties": {"\u00e9": {"type": "integer"}}, "required": ["\u00e9"]}  # fmt: skip
    constraint = JsonSchema(schema)
    assert walk(constraint, TOKENIZER, '{"\u00e9": 1}')
    assert not any("propertyNames" in one for one in constraint.report().checked)
    assert narrowed_schema(schema, 0, 200) is not None


_SHARED = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", ".", "", "\u00e9", r"\x61", "[b-d\u00e9]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        *(inner.map(lambda one, sign=sign: f"({one}){sign}") for sign in ("*", "+", "?", "{0,2}")),
    ),
    max_leaves=5,
)
_TEXTS = ["".join(one) for count in range(4) for one in product("ab1\u00e9", repeat=count)]


@settings(max_examples=200, deadline=None)
@given(_SHARED, st.booleans(), st.booleans())
def test_the_automaton_agrees_with_re_and_the_validator(pattern, has_start_anchor, has_end_anchor):
    """For the syntax shared by the notations, on patterns without long backtracking."""
    pattern = f"{'^' * has_start_anchor}(?:{pattern}){'$' * has_end_anchor}"
    grammar = byte_grammar.ByteGrammar({"": search_expression(pattern)})
    for text in _TEXTS:
        state: int | None = grammar.start_states[0]
        for one in text.encode().translate(grammar.classes):
            state = None if state is None else grammar.transitions[state].get(one)
        expected = re.search(pattern, text) is not None
        assert (state is not None and grammar.completed_rule[state] == 0) == expected, text
        assert matches(pattern, text) == expected, text


def test_no_name_is_searched_if_there_are_too_many_patterns():
    many = [{"not": {"propertyNames": {"not": {"pattern": f"{i}"}}}} for i in range(200)]
    assert narrowed_schema({"type": "object", "allOf": many}, 0, 10_000).get("required") is None
    assert list(zip(range(2), matching_texts([EMPTY, search_expression("^$")]), strict=False)) == []


def test_chains_of_references_that_overflow_the_stack_are_rejected():
    program = """
import json
import os
from anydecode import Grammar, JsonSchema
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer
from anydecode.constraints.tools.families import TOOL_FORMATS
from anydecode.server.protocol import Function, Tool
from anydecode.server.tools import tool_constraint

def chain(count):
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(count): {"type": "string"}}}

def tool(schema):
    tools = [Tool(function=Function(name="f", parameters=schema))]
    form = TOOL_FORMATS["hermes"]
    return tool_constraint(tools, form, required=True, parallel=False, answer_schema=None)

def grammar(schema):
    return Grammar("start: value\\nvalue: %json " + json.dumps(schema))

tokenizer = ByteTokenizer()
for make in (JsonSchema, tool, grammar):
    make(chain(100)).start(tokenizer, 259)
    for count in (1000, 20000):
        try:
            make(chain(count)).start(tokenizer, 259)
        except ConstraintError as error:
            print(error)
"""
    lines = run_in_subprocess(program).splitlines()
    assert len(lines) == 6
    assert all("$ref" in line or "characters" in line for line in lines)
