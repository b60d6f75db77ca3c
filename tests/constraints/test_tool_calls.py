"""Tool calls as a constraint: all of JSON Schema, retries of single calls, forced completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import jsonschema_rs
import pytest

pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.constraints.json.json_schema import JsonSchema  # noqa: E402
from anydecode.constraints.reasoning import AfterReasoning  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.constraints.tools.literals import LiteralCalls  # noqa: E402
from anydecode.constraints.tools.stream import TextStream  # noqa: E402
from anydecode.constraints.tools.tagged import TaggedCalls  # noqa: E402
from anydecode.constraints.tools.tool_calls import ToolCalls, parse_answer  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402
from anydecode.sampling.sampler import Sampler  # noqa: E402

TOKENIZER = ByteTokenizer()
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


class Country(pydantic.BaseModel):
    code: str = pydantic.Field(max_length=2)


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    country: Country


class Trip(pydantic.BaseModel):
    start: City
    stops: list[City] = pydantic.Field(max_length=1)


def object_schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "pydantic": Trip.model_json_schema(),
    "uniqueItems": object_schema(
        xs={"type": "array", "items": DIGIT, "minItems": 3, "maxItems": 4, "uniqueItems": True}
    ),
    "not": object_schema(x={"enum": ["a", "b", "c"], "not": {"enum": ["a", "b"]}}),
    "if": {
        **object_schema(kind={"enum": [1, 2]}),
        "properties": {"kind": {"enum": [1, 2]}, "x": DIGIT},
        "if": {"properties": {"kind": {"const": 1}}},
        "then": {"required": ["x"]},
        "else": {"not": {"required": ["x"]}},
    },
    "oneOf": object_schema(
        x={"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}
    ),
    "formats": object_schema(
        mail={"type": "string", "format": "email", "maxLength": 30},
        at={"type": "string", "format": "date-time"},
    ),
    "times": object_schema(
        at={"type": "string", "format": "date-time"},
        on={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    ),
    "pointer": object_schema(path={"type": "string", "format": "json-pointer", "maxLength": 5}),
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^[ab]$": DIGIT},
        "additionalProperties": False,
    },
    "recursion": {
        **object_schema(tree={"$ref": "#/$defs/Tree"}),
        "$defs": {
            "Tree": object_schema(
                leaves={"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2}
            )
        },
    },
    "draft-07": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **object_schema(c={"$ref": "#/definitions/a~1b"}),
        "definitions": {"a/b": {"type": "string", "maxLength": 3}},
    },
}


def tool_calls(schemas: dict[str, Any], format_name: str = "hermes", **options: Any) -> ToolCalls:
    constraints = {
        name: JsonSchema(schema, whitespace=None, max_string=0, extra_properties=True)
        for name, schema in schemas.items()
    }
    return ToolCalls(constraints, TOOL_FORMATS[format_name], **options)


def parsed(text: str, constraint: ToolCalls) -> tuple[str, list[tuple[str, str]]]:
    """The content of an answer, and its calls with their arguments as text."""
    stream = TextStream()
    content, calls = "", []
    for kind, value in stream.run(constraint.parse(stream), text, final=True):
        if kind == "content":
            content += value
        elif kind == "call":
            calls.append((value, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + value)
    return content, calls


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_call_is_valid_under_its_whole_schema(llm: LLM, name: str) -> None:
    constraint = tool_calls({"f": SCHEMAS[name], "other": object_schema(x=DIGIT)}, is_required=True)
    validator = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
    num_calls = 0
    for seed in range(3):
        out = llm.generate("to", constraint=constraint, max_tokens=400, temperature=1.0, seed=seed)
        assert out.finish_reason == "stop" and out.constraint["complete"]
        content, calls = parsed(out.text, constraint)
        assert not content.strip() and calls
        for tool, arguments in calls:
            num_calls += tool == "f"
            if tool == "f":
                validator.validate(json.loads(arguments))
    assert num_calls


@pytest.mark.one_in(3)  # each format
@pytest.mark.parametrize("format_name", ["qwen3-coder", "llama4", "functiongemma", "kimi"])
@pytest.mark.parametrize("name", ["pydantic", "uniqueItems", "if", "not", "recursion", "times"])
def test_calls_of_every_kind_of_format_are_valid(llm: LLM, name: str, format_name: str) -> None:
    schema = SCHEMAS[name]
    constraint = tool_calls({"f": schema}, format_name, is_required=True, is_parallel=False)
    out = llm.generate("to", constraint=constraint, max_tokens=400, temperature=1.0, seed=1)
    assert out.finish_reason == "stop" and out.constraint["complete"]
    [(tool, arguments)] = parsed(out.text, constraint)[1]
    jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(arguments))


@pytest.mark.parametrize("format_name", ["apriel", "deepseek-v3.1"])
def test_a_value_that_is_rarely_valid_is_narrowed_within_its_call(
    llm: LLM, format_name: str
) -> None:
    """The model prefers to repeat items; everything before the list has been sent."""
    xs = {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True}
    schema = object_schema(x=DIGIT, xs={**xs, "minItems": 4})
    constraint = tool_calls({"f": schema}, format_name, is_required=True, is_parallel=False)
    num_narrowed = 0
    for seed in range(3):
        out = llm.generate("to", constraint=constraint, max_tokens=400, temperature=1.0, seed=seed)
        [(_, arguments)] = parsed(out.text, constraint)[1]
        assert sorted(json.loads(arguments)["xs"]) == [1, 2, 3, 4]
        num_narrowed += out.constraint["narrowed"]
    assert num_narrowed


def test_the_report_names_what_is_validated_for_which_tool() -> None:
    constraint = tool_calls({"f": SCHEMAS["uniqueItems"], "g": object_schema(x=DIGIT)})
    constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    report = constraint.report()
    assert report.checked == ("uniqueItems at #/properties/xs of f",)
    assert "maximum" in report.masked


def feed(constraint: ToolCalls, text: str) -> tuple[list[int | None], Any]:
    """What the validator returns for each byte of `text`, and the validator."""
    constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    validator = constraint.incremental_validator(TOKENIZER)
    assert validator is not None
    return [validator.push(byte) for byte in text.encode()], validator


@pytest.mark.parametrize(
    "format_name", sorted(TOOL_FORMATS.keys() - {"gpt-oss", "gigachat"})
)  # one call
def test_only_the_invalid_value_is_sampled_again(format_name: str) -> None:
    constraint = tool_calls({"f": SCHEMAS["uniqueItems"]}, format_name)
    good, bad = ("f", {"xs": [1, 2, 3]}), ("f", {"xs": [7, 8, 7]})
    text = "é " * (not constraint.call_format.start_trigger)
    text += constraint.call_format.render([good, bad], {"f": SCHEMAS["uniqueItems"]})
    found, validator = feed(constraint, text)
    kept = next(count for count in found if count is not None)
    kinds = (b"", b'false">')  # some formats write the kind of a value before it
    assert text.encode()[kept:].partition(b"[7")[0] in kinds
    # A value that fails again is generated anew; what is before it stays.
    settled = text.encode()[: validator.num_settled]
    assert settled.decode() == validator.settled_text
    assert text.encode()[validator.num_settled :].partition(b"[7")[0] in kinds
    calls = [("f", '{"xs": [1, 2, 3]}'), ("f", '{"xs": ')]
    assert parsed(validator.settled_text, constraint)[1] == calls
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    state = narrowed.with_prefix(validator.settled_text).start(TOKENIZER, TOKENIZER.vocab_size)
    for byte in text.replace("7", "4", 1).encode():
        assert state.allows(byte)
        state.advance(byte)
    assert state.can_stop


def test_calls_without_validated_rules_settle_as_they_grow() -> None:
    constraint = tool_calls({"f": SCHEMAS["uniqueItems"], "g": object_schema(x=DIGIT)})
    text = 'so <tool_call>\n{"name": "g", "arguments": {"x": '
    assert feed(constraint, text)[1].num_settled == len(text)
    text = 'so <tool_call>\n{"name": "f", "arguments": {"xs": '
    assert feed(constraint, text + "[1, 2")[1].num_settled == len(text)
    assert feed(constraint, text + "[1, 2, 3]}")[1].num_settled == len(text + "[1, 2, 3]}")
    reasoning = AfterReasoning(constraint, "<t>", "</t>", True)
    found, validator = feed(reasoning, "why</t>" + text + "[1")
    assert validator.num_settled == len("why</t>" + text) and set(found) == {None}


def test_arguments_that_are_validated_whole_are_held_behind_the_name() -> None:
    schema = {
        **object_schema(a={"type": "integer"}, b={"type": "integer"}),
        "if": {"properties": {"a": {"multipleOf": 3}}},
        "then": {"properties": {"b": {"multipleOf": 2}}},
    }
    constraint = tool_calls({"f": schema})
    start = '<tool_call>\n{"name": "f", "arguments": '
    assert feed(constraint, start + '{"a": 3, "b": 4')[1].num_settled == len(start)
    found, validator = feed(constraint, start + '{"a": 3, "b": 5}')
    assert found[-1] == len(start) and validator.settled_text == start
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    state = narrowed.with_prefix(start).start(TOKENIZER, TOKENIZER.vocab_size)
    text = start + '{"a": 3, "b": 4}}\n</tool_call>'
    assert state.allows_sequence(list(text.encode()))
    assert not state.allows_sequence(list(text.replace("4", "5").encode()))


HELD = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "trip": object_schema(
            city={"type": "string"},
            xs={"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3},
        ),
        "last": DIGIT,
    },
    "required": ["note", "trip", "last"],
}
OTHER_FORMATS = sorted(
    name for name, one in TOOL_FORMATS.items() if isinstance(one, (TaggedCalls, LiteralCalls))
)


@pytest.mark.parametrize("format_name", OTHER_FORMATS)
def test_arguments_not_written_as_json_are_settled_up_to_a_value_within_them(
    format_name: str,
) -> None:
    constraint = tool_calls({"f": HELD}, format_name)
    good = {"note": 'a "b"\nc', "trip": {"city": "Rom", "xs": [1, 2, 3]}, "last": 4}
    bad = {**good, "trip": {"city": "Rom", "xs": [3, 2, 3]}}
    text = constraint.call_format.render([("f", bad)], {"f": HELD})
    found, validator = feed(constraint, text)
    settled = validator.settled_text
    assert settled == text.partition("[3")[0].rstrip(" ") + " " * settled.endswith(" ")
    assert {kept for kept in found if kept is not None} == {validator.num_settled}
    assert parsed(settled, constraint)[1] == [
        ("f", '{"note": "a \\"b\\"\\nc", "trip": {"city": "Rom", "xs": ')
    ]
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    state = narrowed.with_prefix(settled).start(TOKENIZER, TOKENIZER.vocab_size)
    other = constraint.call_format.render([("f", good)], {"f": HELD})
    assert state.allows_sequence(list(other.encode())[:-1])
    assert not state.allows_sequence(list(text.encode())[:-1])
    # Behind the value, the rest is settled as it grows.
    found, validator = feed(constraint, other)
    assert set(found) == {None}
    [(_, arguments)] = parsed(validator.settled_text, constraint)[1]
    assert json.loads(arguments) == good


@pytest.mark.parametrize("format_name", OTHER_FORMATS)
def test_arguments_that_depend_on_each_other_are_held_behind_the_name(format_name: str) -> None:
    schema = {
        **object_schema(a={"type": "integer"}, b={"type": "integer"}),
        "if": {"properties": {"a": {"multipleOf": 3}}},
        "then": {"properties": {"b": {"multipleOf": 2}}},
    }
    constraint = tool_calls({"get": schema, "get_more": object_schema(x=DIGIT)}, format_name)
    call_format = constraint.call_format
    good = call_format.render([("get", {"a": 3, "b": 4})], {"get": schema})
    bad = call_format.render([("get", {"a": 3, "b": 5})], {"get": schema})
    found, validator = feed(constraint, bad)
    settled = validator.settled_text
    assert settled.partition("get")[2].strip() in ("", '">', ">", "(")
    assert {kept for kept in found if kept is not None} == {len(settled.encode())}
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    state = narrowed.with_prefix(settled).start(TOKENIZER, TOKENIZER.vocab_size)
    assert state.allows_sequence(list(good.encode()))
    assert not state.allows_sequence(list(bad.encode()))


def test_a_call_of_another_tool_that_is_open_stays_as_it_is() -> None:
    """If the answer is too long there, nothing else is narrowed either."""
    schemas = {"f": SCHEMAS["uniqueItems"], "g": object_schema(note={"type": "string"})}
    constraint = tool_calls(schemas, "qwen3-coder")
    text = constraint.call_format.render([("g", {"note": "so on"})], schemas)
    validator = feed(constraint, text.partition(" on")[0])[1]
    assert text.startswith(validator.settled_text) and "so" in validator.settled_text
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    prefix = validator.settled_text
    state = narrowed.with_prefix(prefix).start(TOKENIZER, TOKENIZER.vocab_size)
    assert state.allows_sequence(list(text.encode()))


def test_an_answer_beside_tools_settles_up_to_the_value_that_is_validated() -> None:
    answer = JsonSchema(
        SCHEMAS["uniqueItems"]
        | {"properties": {"a": DIGIT, "xs": SCHEMAS["uniqueItems"]["properties"]["xs"]}},
        whitespace=None,
    )
    constraint = tool_calls({"f": object_schema(x=DIGIT)}, answer=answer)
    start = '{"a": 1, "xs": '
    assert feed(constraint, start[:8])[1].num_settled == 8
    found, validator = feed(constraint, start + "[1, 2, 1]")
    assert validator.settled_text == start and found[-1] == len(start)
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    state = narrowed.with_prefix(start).start(TOKENIZER, TOKENIZER.vocab_size)
    assert state.allows_sequence(list((start + "[1, 2, 3]}").encode()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "format_name",
    ["hermes", "mistral-args", "kimi", "qwen3-coder", "glm", "deepseek-v3.2", "llama4", "gemma4"],
)
def test_streamed_calls_are_those_of_the_whole_answer(llm: LLM, format_name: str) -> None:
    """Before the list, everything is sent while the model generates; the list when it is valid."""
    schema = object_schema(x=DIGIT, xs=SCHEMAS["uniqueItems"]["properties"]["xs"])
    options: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0}
    num_tries = 0
    for seed in range(3):
        constraint = tool_calls({"f": schema}, format_name, is_required=True, is_parallel=False)
        whole = llm.generate("to", constraint=constraint, seed=seed, **options)
        *parts, last = llm.stream("to", constraint=constraint, seed=seed, **options)
        sent = ["", *accumulate(part.text for part in parts)]
        assert sent[-1] + last.text == whole.text
        num_tries += whole.constraint["tries"]
        [(_, arguments)] = parsed(whole.text, constraint)[1]
        xs = json.loads(arguments)["xs"]
        assert len(set(xs)) == len(xs)
        before, separator, _ = whole.text.partition(f"[{xs[0]}")
        items = re.compile(", ?".join(map(str, xs)))
        assert not any(before + separator in one and not items.search(one) for one in sent)
        assert before.startswith(sent[1]) and "f" in sent[1]
    assert num_tries


def test_settled_tokens_are_streamed_before_the_answer_is_valid() -> None:
    """The reasoning is settled; the value is held back until it is valid."""
    schema = {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    with scripted_llm() as llm:
        options: dict[str, Any] = {"max_tokens": 600, "temperature": 1.0, "logprobs": 0}
        for seed in range(4):
            constraint = AfterReasoning(JsonSchema(schema), "<t>", "</t>", True)
            whole = llm.generate("a", constraint=constraint, seed=seed, **options)
            *parts, last = llm.stream("a", constraint=constraint, seed=seed, **options)
            assert "".join(part.text for part in (*parts, last)) == whole.text
            if "</t>" in whole.text:
                assert len(parts) > 2
                assert len(set(json.loads(whole.text.partition("</t>")[2]))) == 2
            assert len(whole.logprobs) == len(whole.tokens)


def test_text_is_cut_by_the_token_limit_and_calls_are_completed(llm: LLM) -> None:
    words = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    constraint = tool_calls({"f": object_schema(words=words)}, is_required=True)
    for seed in range(3):
        out = llm.generate("to", constraint=constraint, max_tokens=90, temperature=1.0, seed=seed)
        assert out.finish_reason == "stop"
        for _, arguments in parsed(out.text, constraint)[1]:
            assert json.loads(arguments)["words"]
    free = tool_calls({"f": object_schema(words=words)})
    for seed in range(12):
        out = llm.generate("to", constraint=free, max_tokens=90, temperature=1.0, seed=seed)
        content, calls = parsed(out.text, free)
        assert calls or not out.constraint["steered"]


def test_the_token_limit_chooses_no_tool(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is that of the answer without the limit, also where only another one's call fits."""
    tools = {
        "f": object_schema(x=DIGIT),
        "g": object_schema(words={"enum": ["a long text that is needed"]}),
    }
    constraint = tool_calls(tools, is_required=True, is_parallel=False)

    def names(limit: int) -> list[list[str]]:
        options: dict[str, Any] = {"constraint": constraint, "temperature": 1.0}
        answers = [llm.generate("to", max_tokens=limit, seed=seed, **options) for seed in range(8)]
        return [[name for name, _ in parsed(one.text, constraint)[1]] for one in answers]

    chosen = names(400)
    assert {name for calls in chosen for name in calls} == {"f", "g"}
    for limit in (50, 70, 90):
        assert names(limit) == chosen
    monkeypatch.setattr(ToolCalls, "_may_force", lambda self, text: True)
    assert names(70) != chosen


@pytest.mark.parametrize("call_format, max_calls", [("hermes", 1), ("functiongemma", 4)])
def test_calls_that_fit_are_never_shortened(
    llm: LLM, call_format: str, max_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {"f": object_schema(x=DIGIT), "g": object_schema(word={"enum": ["a", "bb", "ccc"]})}
    for schema in tools.values():
        schema["additionalProperties"] = False
    constraint = tool_calls(tools, call_format, is_required=True)

    def generate(limit: int, seed: int) -> Any:
        options: dict[str, Any] = {"constraint": constraint, "temperature": 1.0, "seed": seed}
        another = dict.fromkeys(TOKENIZER.eos_ids, -0.5)  # call, now and then
        return llm.generate("to", max_tokens=limit, logit_bias=another, **options)

    free = {seed: generate(600, seed) for seed in range(10)}
    free = {seed: one for seed, one in free.items() if len(one.tokens) < 300}
    assert max(len(parsed(one.text, constraint)[1]) for one in free.values()) == max_calls
    for seed, one in free.items():
        for more in (0, 1, 12):
            assert generate(len(one.tokens) + more, seed).text == one.text
    monkeypatch.setattr(Sampler, "_sample_fitting", lambda *arguments: None)
    assert any(generate(len(one.tokens), seed).text != one.text for seed, one in free.items())


def test_no_call_starts_that_would_not_fit(llm: LLM) -> None:
    constraint = tool_calls({"f": SCHEMAS["uniqueItems"]}, "functiongemma", is_required=True)
    valid = jsonschema_rs.validator_for(SCHEMAS["uniqueItems"])
    for limit, seed in ((127, 0), (127, 1), (144, 2)):
        options: dict[str, Any] = {"max_tokens": limit, "temperature": 1.0, "seed": seed}
        out = llm.generate("to", constraint=constraint, **options)
        assert out.finish_reason == "stop"
        for _, arguments in parsed(out.text, constraint)[1]:
            valid.validate(json.loads(arguments))


def test_an_answer_format_beside_tools_is_validated_too(llm: LLM) -> None:
    answer = JsonSchema(SCHEMAS["uniqueItems"], whitespace=None)
    constraint = tool_calls({"f": object_schema(x=DIGIT)}, answer=answer)
    valid = jsonschema_rs.validator_for(SCHEMAS["uniqueItems"])
    num_answers = 0
    for seed in range(6):
        out = llm.generate("to", constraint=constraint, max_tokens=200, temperature=1.0, seed=seed)
        content, calls = parsed(out.text, constraint)
        num_answers += not calls
        if not calls:
            valid.validate(json.loads(content))
    assert num_answers
    text = '{"xs": "<tool_call>"}'
    assert parsed(text, constraint) == (text, [])


def test_errors_name_the_tool() -> None:
    constraint = tool_calls({"f": object_schema(x=DIGIT), "g": {"type": "object", "not": {}}})
    with pytest.raises(ConstraintError, match="parameters of tool 'g' cannot be enforced"):
        constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    with pytest.raises(ConstraintError, match="at least one tool"):
        tool_calls({})


def test_parallel_calls_can_be_forbidden() -> None:
    for is_parallel in (True, False):
        constraint = tool_calls({"f": object_schema(x=DIGIT)}, is_parallel=is_parallel)
        state = constraint.start(TOKENIZER, TOKENIZER.vocab_size)
        text = constraint.call_format.render([("f", {"x": 1}), ("f", {"x": 2})])
        assert state.allows_sequence(list(text.encode())) == is_parallel


def test_parsers_of_the_server_and_of_the_constraint_agree() -> None:
    constraint = tool_calls({"f": object_schema(x=DIGIT)})
    text = "so " + constraint.call_format.render([("f", {"x": 1})])
    stream = TextStream()
    events = stream.run(
        parse_answer(stream, constraint.call_format, {}, has_answer=False, is_required=False),
        text,
        final=True,
    )
    assert [kind for kind, _ in events] == ["content", "call", "arguments", "end"]
