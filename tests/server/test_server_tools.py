"""Tools whose parameters are schemas with references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.constraints.tools.literals import LiteralCalls  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402
from anydecode.server.protocol import Function, Tool  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from anydecode.server.tools import tool_constraint  # noqa: E402
from replaying import replaying_llm  # noqa: E402
from server_client import CHAT, served  # noqa: E402


def accepts(tools: dict[str, Any], format_name: str, calls: list[tuple[str, Any]]) -> bool:
    """Whether the constraint for `tools` (schemas by name) accepts exactly `calls`."""
    call_format = TOOL_FORMATS[format_name]
    offered = [Tool(function=Function(name=name, parameters=one)) for name, one in tools.items()]
    constraint = tool_constraint(
        offered, call_format, required=True, parallel=True, answer_schema=None
    )
    tokenizer = ByteTokenizer()
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    validator = constraint.incremental_validator(tokenizer)
    for byte in call_format.render(calls, tools).encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
        if validator is not None and validator.push(byte) is not None:
            return False
    return state.can_stop and (validator is None or validator.end() is None)


def object_schema(**properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LIST = {"type": "array", "items": {"$ref": "#"}}
INTEGER, NULL = {"type": "integer"}, {"type": "null"}
#: By name: a schema, a valid value, and an invalid one.
SCHEMAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "defs": (
        {**object_schema(c={"$ref": "#/$defs/C"}), "$defs": {"C": object_schema(x=INTEGER)}},
        {"c": {"x": 1}},
        {"c": 1},
    ),
    "definitions": (
        {**object_schema(c={"$ref": "#/definitions/a~1b"}), "definitions": {"a/b": INTEGER}},
        {"c": 1},
        {"c": ""},
    ),
    "root": (object_schema(c=LIST), {"c": [{"c": []}]}, {"c": [1]}),
    "pointer": (
        object_schema(x=INTEGER, y={"$ref": "#/properties/x"}),
        {"x": 1, "y": 2},
        {"x": 1, "y": ""},
    ),
    "root reference": (
        {
            "$ref": "#/$defs/N",
            "$defs": {"N": object_schema(n={"anyOf": [{"$ref": "#/$defs/N"}, NULL]})},
        },
        {"n": {"n": None}},
        {"n": 1},
    ),
    "id": (
        {
            "$id": "https://x.org/a.json",
            **object_schema(c={"$ref": "https://x.org/a.json#/$defs/C"}),
            "$defs": {"C": INTEGER},
        },
        {"c": 1},
        {"c": ""},
    ),
    "nested id": (
        {
            **object_schema(c={"$ref": "b.json"}),
            "$defs": {
                "B": {
                    "$id": "b.json",
                    **object_schema(z={"$ref": "#/$defs/Q"}),
                    "$defs": {"Q": INTEGER},
                }
            },
        },
        {"c": {"z": 1}},
        {"c": {"z": ""}},
    ),
    "anchor": (
        {**object_schema(c={"$ref": "#here"}), "$defs": {"C": {"$anchor": "here", **INTEGER}}},
        {"c": 1},
        {"c": ""},
    ),
    "a name": (
        object_schema(**{"$ref": {"const": {"$ref": "#/$defs/C"}}}),
        {"$ref": {"$ref": "#/$defs/C"}},
        {"$ref": 1},
    ),
    "data": (
        object_schema(c={"enum": [{"$ref": "#/none"}], "default": {"$ref": "#/none"}}),
        {"c": {"$ref": "#/none"}},
        {"c": 1},
    ),
}


def _cases() -> Iterator[Any]:
    """Every schema in one format of each class, and every format with one schema; the others are
    slow."""
    of_classes = {type(one): name for name, one in reversed(TOOL_FORMATS.items())}.values()
    names = list(SCHEMAS)
    for number, format_name in enumerate(TOOL_FORMATS):
        for name in names:
            is_fast = format_name in of_classes or name == names[number % len(names)]
            yield pytest.param(name, format_name, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "format_name"), [*_cases()])
def test_references_resolve_within_their_own_schema(name: str, format_name: str) -> None:
    """Another tool defines the same names differently."""
    schema, good, bad = SCHEMAS[name]
    other = {
        **object_schema(c={"$ref": "#/$defs/C"}, x={"$ref": "#/definitions/a~1b"}),
        "$defs": {"C": {"const": "other"}, "N": {}, "B": {}},
        "definitions": {"a/b": {"const": "other"}},
    }
    other_value = {"c": "other", "x": "other"}
    for tools in ({"f": schema}, {"f": schema, "g": other}, {"g": other, "f": schema}):
        assert accepts(tools, format_name, [("f", good)])
        assert not accepts(tools, format_name, [("f", bad)])
        assert not accepts(tools, format_name, [("h", good)])
        if "g" in tools:
            assert accepts(tools, format_name, [("g", other_value)])
            assert not accepts(tools, format_name, [("g", good)])
            assert not accepts(tools, format_name, [("f", other_value)])


def test_lists_of_calls_need_at_least_one_call() -> None:
    tools = {"f": object_schema(x=INTEGER), "g": object_schema(y=INTEGER)}
    calls = [("f", {"x": 1}), ("g", {"y": 2}), ("f", {"x": 3})]
    assert accepts(tools, "mistral", calls)
    assert not accepts(tools, "mistral", [])


@pytest.mark.parametrize(
    ("reference", "problem"),
    [("#/$defs/none", "Pointer '/\\$defs/none' does not exist"), ("https://x.org/a", "x.org/a")],
)
def test_an_unresolvable_reference_names_its_tool(reference: str, problem: str) -> None:
    with pytest.raises(ConstraintError, match=f"parameters of tool 'g' cannot be .*{problem}"):
        accepts(
            {"f": object_schema(x=INTEGER), "g": object_schema(c={"$ref": reference})}, "hermes", []
        )


# The docstrings are part of the prompt, so they determine the scripted model's answers.
class Country(pydantic.BaseModel):
    """A class within one within another."""

    model_config = {"extra": "forbid"}
    code: Literal["no", "it"]


class City(pydantic.BaseModel):
    """A class within another one."""

    model_config = {"extra": "forbid"}
    name: Literal["Oslo", "Rome"]
    country: Country


class Trip(pydantic.BaseModel):
    """Where from and where to."""

    model_config = {"extra": "forbid"}
    start: City
    stops: list[City] = pydantic.Field(max_length=1)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with scripted_llm() as llm, LiveServer(llm, Settings(name="scripted", port=0)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


@pytest.mark.clients
@pytest.mark.parametrize("stream", [False, True])
def test_nested_pydantic_models_work_as_tools(client: Any, stream: bool) -> None:
    tools: Any = [
        openai.pydantic_function_tool(Trip),
        {"type": "function", "function": {"name": "go", "parameters": City.model_json_schema()}},
    ]
    for seed in range(4):
        answer = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "to Oslo"}],
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=1000,
            seed=seed,
            stream=stream,
        )
        if stream:
            deltas = [choice.delta for chunk in answer for choice in chunk.choices]
            calls = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            calls = answer.choices[0].message.tool_calls
        model: Any = Trip if calls[0].function.name == "Trip" else City
        arguments = "".join(call.function.arguments for call in calls)
        assert model.model_validate_json(arguments)


FORECAST = object_schema(days={"type": "array", "items": INTEGER}, town={"type": "string"})
UNIQUE = {**FORECAST, "properties": {**FORECAST["properties"]}}
UNIQUE["properties"]["days"] = {**UNIQUE["properties"]["days"], "uniqueItems": True}
CALLS = [("forecast", {"days": [1, 2, 3], "town": "Tromsø"}), ("go", {"to": 'a \\ "b"'})]
SCHEMAS_OF_CALLS = {"forecast": FORECAST, "go": object_schema(to={"type": "string"})}
#: Formats of which an answer has at most one call.
SINGLE = ("gpt-oss", "gigachat")
#: Formats of different kinds.
FAST = ("gpt-oss", "llama4", "mistral-args", "qwen3-coder")
TEXT = "Let me look.\n" + TOOL_FORMATS["hermes"].render(CALLS)


def offered(forecast: dict[str, Any] = FORECAST) -> list[dict[str, Any]]:
    schemas = {**SCHEMAS_OF_CALLS, "forecast": forecast}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream, read as OpenAI's clients do."""
    content, calls, reason = "", [], ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(calls):
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["function"]["arguments"] == "" and call["type"] == "function"
                    calls.append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"} and call["index"] == len(calls) - 1
                    assert set(call["function"]) == {"arguments"}
                    calls[-1]["arguments"] += call["function"]["arguments"]
    return content, calls, reason


FIELDS: dict[str, Any] = {"max_tokens": 600, "temperature": 0, "decoder": "autoregressive"}


def test_arguments_are_streamed_as_they_are_generated() -> None:
    with replaying_llm(TEXT) as llm, served(llm) as client:
        chunks = client.single_chunks(llm, CHAT, **FIELDS, tools=offered())
        content, calls, reason = joined(chunks)
        assert (content.strip(), reason) == ("Let me look.", "tool_calls")
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
        assert len({call["id"] for call in calls}) == 2
        parts = [part for index in range(2) for part in argument_parts(chunks, index)]
        assert len(parts) > 20 and max(map(len, parts)) < 10
        message = client.ask(CHAT, **FIELDS, tools=offered())["choices"][0]["message"]
        assert message["content"].strip() == "Let me look."
        plain = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message["tool_calls"]
        ]
        assert plain == [(call["name"], call["arguments"]) for call in calls]


def argument_parts(chunks: list[dict[str, Any]], index: int) -> list[str]:
    """The parts of the arguments of a call in a stream."""
    return [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
        if call["index"] == index
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "format_name", ["hermes", "qwen3-coder", "glm", "deepseek-v3.2", "llama4", "gemma4"]
)
def test_only_a_value_that_is_validated_is_held_back(format_name: str) -> None:
    call_format = TOOL_FORMATS[format_name]
    text = "Let me look.\n" + call_format.render(CALLS, SCHEMAS_OF_CALLS)
    with replaying_llm(text) as llm, served(llm, tool_parser=format_name) as client:
        chunks = client.single_chunks(llm, CHAT, **FIELDS, tools=offered(UNIQUE))
        _, calls, _ = joined(chunks)
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
        parts = argument_parts(chunks, 0)
        if isinstance(call_format, LiteralCalls):  # their items are parsed one by one
            assert "[1, 2, 3" in "".join(parts)
        else:
            assert any("[1, 2, 3" in part for part in parts)
        assert len(parts) > 8
        assert len(argument_parts(chunks, 1)) > 4
        contents = [
            one for chunk in chunks for one in chunk["choices"] if one["delta"].get("content")
        ]
        assert len(contents) > 5


@pytest.mark.parametrize(
    "format_name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in sorted(TOOL_FORMATS)
    ],
)
def test_arguments_are_streamed_in_every_format(format_name: str) -> None:
    """`--tool-parser` chooses the format."""
    call_format = TOOL_FORMATS[format_name]
    text = call_format.render(CALLS, SCHEMAS_OF_CALLS)
    with replaying_llm(text) as llm, served(llm, tool_parser=format_name) as client:
        fields = {**FIELDS, "max_tokens": 800, "tools": offered()}
        chunks = client.single_chunks(llm, CHAT, **fields)
        content, calls, reason = joined(chunks)
        assert (content.strip(), reason) == ("", "tool_calls")
        found = [(call["name"], json.loads(call["arguments"])) for call in calls]
        assert found == CALLS[: len(calls)] and (len(calls) == 2 or format_name in SINGLE)
        parts = argument_parts(chunks, 0)
        assert len(parts) > 8
        [choice] = client.ask(CHAT, **fields)["choices"]
        plain = [one["function"] for one in choice["message"]["tool_calls"]]
        streamed = [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
        assert plain == streamed and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "format_name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in sorted(TOOL_FORMATS)
    ],
)
def test_a_call_without_room_for_its_end_is_cut_in_every_format(format_name: str) -> None:
    text = TOOL_FORMATS[format_name].render(CALLS[:1], SCHEMAS_OF_CALLS)
    with replaying_llm(text) as llm, served(llm, tool_parser=format_name) as client:
        for end, parts in (("forecast", ("", "{")), ("Tro", ('{"days": [1, 2, 3], "town": "Tro',))):
            limit = len(text[: text.index(end) + len(end)].encode()) + 2 * (end == "forecast")
            fields = {**FIELDS, "max_tokens": limit, "tools": offered()}
            choice = client.ask(CHAT, **fields)["choices"][0]
            [call] = choice["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            reason = choice["finish_reason"]
            assert name == "forecast" and not choice["message"].get("content")
            if reason == "tool_calls":  # there was room for a shorter call
                assert set(json.loads(arguments)) == {"days", "town"}
            else:
                assert reason == "length" and arguments in parts
            content, [streamed], streamed_reason = joined(client.chunks(CHAT, **fields))
            assert (streamed["name"], streamed["arguments"]) == (name, arguments)
            assert (content, streamed_reason) == ("", reason)


@pytest.mark.parametrize("forecast", [FORECAST, UNIQUE])
def test_the_token_limit_cuts_a_call(forecast: dict[str, Any]) -> None:
    limit = TEXT.encode().index(b"Troms")
    with replaying_llm(TEXT) as llm, served(llm) as client:
        fields = {**FIELDS, "max_tokens": limit, "tools": offered(forecast)}
        response = client.ask(CHAT, **fields)["choices"][0]
        [call] = response["message"]["tool_calls"]
        assert response["finish_reason"] == "length"
        assert call["function"] == {
            "name": "forecast",
            "arguments": '{"days": [1, 2, 3], "town": "',
        }
        _, [streamed], reason = joined(client.chunks(CHAT, **fields))
        assert (streamed["arguments"], reason) == (call["function"]["arguments"], "length")


def test_choices_of_tools() -> None:
    def names(**fields: Any) -> list[str]:
        message = client.ask(CHAT, **FIELDS, tools=offered(), **fields)["choices"][0]["message"]
        return [call["function"]["name"] for call in message.get("tool_calls", [])]

    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    with replaying_llm(TEXT) as llm, served(llm) as client:
        assert names() == names(tool_choice="auto") == ["forecast", "go"]
        assert names(parallel_tool_calls=False) == ["forecast"]
        assert names(tool_choice="none") == []
        assert names(tool_choice="required")[:1] != []
        named = {"type": "function", "function": {"name": "go"}}
        assert set(names(tool_choice=named)) == {"go"}
        assert set(names(tool_choice=allowed("required", "go"))) == {"go"}
        assert names(tool_choice=allowed("auto", "forecast", "go")) == ["forecast", "go"]
        for choice, problem in (
            ("maybe", "it must be none, auto, required"),
            (allowed("auto"), "needs a mode"),
            (allowed("some", "go"), "needs a mode"),
            (allowed("auto", "fly"), "is not one of the given tools"),
        ):
            error = client.refused(CHAT, tools=offered(), tool_choice=choice)
            assert problem in error["message"] and error["param"] == "tool_choice"
        # The tools that are allowed may be whole definitions: their names count.
        definitions = {"type": "allowed_tools", "allowed_tools": None, "tools": offered()}
        answer = client.ask(CHAT, **FIELDS, tools=offered(), tool_choice=definitions)
        assert answer["anydecode"]["ignored"] == ["tool_choice.tools.function.parameters"]


GO = {"type": "function", "function": {"name": "go"}}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({**GO, "strict": True}, "tool_choice.strict"),
        ({**GO, "name": "go"}, "tool_choice.name"),
        ({**GO, "mode": "auto"}, "tool_choice.mode"),
        ({"type": "function", "function": {"name": "go", "arguments": {}}},
         "tool_choice.function.arguments"),
        ({"type": "function", "name": "go", "tools": [GO]}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [GO], "tool": 0}},
         "tool_choice.allowed_tools.tool"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [GO], "name": "go"},
         "tool_choice.name"),
    ],
)  # fmt: skip
def test_unknown_fields_of_a_choice_are_refused(llm: Any, choice: Any, param: str) -> None:
    with served(llm) as client:
        for fields in (choice, {**choice, "server_label": None}):  # null is no field
            error = client.refused(CHAT, tools=offered(), tool_choice=fields)
            assert (error["code"], error["param"]) == ("unknown_parameter", param)
            assert error["message"] == f"unknown field {param}"


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"type": "custom", "custom": {"name": "go"}}, "it must be function or allowed_tools"),
        ({"type": ["function"], "name": "go"}, "it must be function or allowed_tools"),
        ({"type": "function", "function": "go"}, "tool_choice.function must be an object"),
        ({"type": "allowed_tools", "allowed_tools": [GO]}, "allowed_tools must be an object"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "go"}]},
         "is not one of the given tools"),
    ],
)  # fmt: skip
def test_choices_of_other_kinds_are_refused(llm: Any, choice: Any, problem: str) -> None:
    with served(llm) as client:
        error = client.refused(CHAT, tools=offered(), tool_choice=choice)
        assert problem in error["message"] and error["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_once(stream: bool) -> None:
    twice = TOOL_FORMATS["hermes"].render([("go", {"to": "a"}), ("go", {"to": "b"})])
    named = {"type": "function", "function": {"name": "go"}}
    fields = {**FIELDS, "tools": offered(), "tool_choice": named}
    with replaying_llm(twice) as llm, served(llm) as client:
        if stream:
            _, calls, reason = joined(client.chunks(CHAT, **fields))
            assert [call["arguments"] for call in calls] == ['{"to": "a"}']
        else:
            choice = client.ask(CHAT, **fields)["choices"][0]
            reason = choice["finish_reason"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "go", "arguments": '{"to": "a"}'}
        assert reason == "tool_calls"
        both = client.ask(CHAT, **{**fields, "tool_choice": "required"})["choices"][0]
        assert len(both["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_is_no_call_to_run(stream: bool) -> None:
    text = TOOL_FORMATS["hermes"].render([("go", {"to": "ab"}), ("go", {"to": "cd"})])
    fields = {**FIELDS, "tools": offered(), "tool_choice": "required"}
    with replaying_llm(text) as llm, served(llm) as client:
        for stop, expected in (("b", "stop"), ("d", "stop"), ("</tool_call>", "tool_calls")):
            if stream:
                reason = joined(client.chunks(CHAT, **fields, stop=stop))[2]
            else:
                choice = client.ask(CHAT, **fields, stop=stop)["choices"][0]
                reason = choice["finish_reason"]
            assert reason == expected, stop


def test_a_format_of_gpt_oss_applies_behind_the_reasoning() -> None:
    """Also if the model would add the kind of its content to the header of its last message."""
    thought = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final"
    schema = object_schema(a={"enum": [1, 2]})
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for header in ("<|message|>", " <|constrain|>json<|message|>"):
        with replaying_llm(thought + header + '{"a": 2}') as llm:
            with served(llm, tool_parser="gpt-oss") as client:
                answer = client.ask(
                    CHAT, response_format=response_format, max_tokens=200, temperature=0
                )
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert json.loads(message["content"])["a"] in (1, 2)
        assert answer["choices"][0]["finish_reason"] == "stop"


THOUGHT = "<|channel|>analysis<|message|>Hm. Hm. Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["text", "format", "tools", "required", "tools and format"])
def test_max_thinking_tokens_ends_the_reasoning_of_gpt_oss(kind: str) -> None:
    schema = object_schema(a={"enum": [1, 2]})
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    call = TOOL_FORMATS["gpt-oss"].render([("go", {"to": "a"})])
    has_call = kind in ("tools", "required")
    rest = call if has_call else FINAL + ("Hi" if kind == "text" else '{"a": 2}')
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    if "format" in kind:
        fields["response_format"] = response_format
    if kind not in ("text", "format"):
        fields["tools"] = offered()
        fields["tool_choice"] = "required" if kind == "required" else "auto"
    short = "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant"
    with replaying_llm(THOUGHT + rest) as whole, replaying_llm(short + rest) as limited:
        with served(whole, tool_parser="gpt-oss") as client:
            message = client.ask(CHAT, **fields)["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm. Hm. Hm."
            _check_answer(message, kind)
        # What the model would do behind the reasoning so far is taken from the second model.
        with served(limited, tool_parser="gpt-oss") as client:
            answer = client.ask(CHAT, max_thinking_tokens=4, **fields)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm. "
        _check_answer(message, kind)
        with served(whole, tool_parser="gpt-oss") as client:
            answer = client.ask(CHAT, max_thinking_tokens=4, **fields)
            assert answer["choices"][0]["message"]["reasoning_content"] == "Hm. "


def _check_answer(message: dict[str, Any], kind: str) -> None:
    if kind in ("tools", "required"):
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "go", "arguments": '{"to": "a"}'}
    elif kind == "text":
        assert message["content"] == "Hi"
    else:
        assert message["content"] == '{"a": 2}' and "tool_calls" not in message


def test_an_answer_of_gpt_oss_beside_tools_is_validated_behind_the_reasoning() -> None:
    """The schema needs validation, and the first answer is invalid."""
    schema = {**object_schema(a={"enum": [1, 2]}), "not": {"properties": {"a": {"const": 1}}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with replaying_llm(THOUGHT + FINAL + '{"a": 1}') as llm:
        with served(llm, tool_parser="gpt-oss") as client:
            for stream in (False, True):
                fields: dict[str, Any] = {"response_format": response_format, "tools": offered(),
                                          "max_tokens": 300, "temperature": 0}  # fmt: skip
                if stream:
                    content = joined(client.chunks(CHAT, **fields))[0]
                else:
                    message = client.ask(CHAT, **fields)["choices"][0]["message"]
                    assert message["reasoning_content"] == "Hm. Hm. Hm."
                    content = message["content"]
                assert json.loads(content) == {"a": 2}
