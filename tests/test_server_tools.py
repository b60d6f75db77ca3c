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

from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.evaluation.certify import scripted_llm  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402
from anydecode.server.parsers import TOOL_FORMATS  # noqa: E402
from anydecode.server.protocol import Function, Tool  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from anydecode.server.tools import tool_constraint  # noqa: E402


def accepts(tools: dict[str, Any], style: str, calls: list[tuple[str, Any]]) -> bool:
    """Whether a model may make `calls` of `tools` (schemas by name), and then end."""
    form = TOOL_FORMATS[style]
    offered = [Tool(function=Function(name=name, parameters=one)) for name, one in tools.items()]
    constraint = tool_constraint(offered, form, required=True, parallel=True, answer=None)
    written = [json.dumps({"name": name, form.arguments: value}) for name, value in calls]
    whole = f"[{', '.join(written)}]" if form.listed else form.closing.join(written)
    tokenizer = ByteTokenizer()
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    for byte in f"{form.opening}{whole}{form.closing}".encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
    return state.may_stop


def of(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LIST = {"type": "array", "items": {"$ref": "#"}}
INTEGER, NULL = {"type": "integer"}, {"type": "null"}
#: A schema, a value that is valid under it, and one that is not.
SCHEMAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "defs": (
        {**of(c={"$ref": "#/$defs/C"}), "$defs": {"C": of(x=INTEGER)}},
        {"c": {"x": 1}},
        {"c": 1},
    ),
    "definitions": (
        {**of(c={"$ref": "#/definitions/a~1b"}), "definitions": {"a/b": INTEGER}},
        {"c": 1},
        {"c": ""},
    ),
    "root": (of(c=LIST), {"c": [{"c": []}]}, {"c": [1]}),
    "pointer": (of(x=INTEGER, y={"$ref": "#/properties/x"}), {"x": 1, "y": 2}, {"x": 1, "y": ""}),
    "root reference": (
        {"$ref": "#/$defs/N", "$defs": {"N": of(n={"anyOf": [{"$ref": "#/$defs/N"}, NULL]})}},
        {"n": {"n": None}},
        {"n": 1},
    ),
    "id": (
        {
            "$id": "https://x.org/a.json",
            **of(c={"$ref": "https://x.org/a.json#/$defs/C"}),
            "$defs": {"C": INTEGER},
        },
        {"c": 1},
        {"c": ""},
    ),
    "nested id": (
        {
            **of(c={"$ref": "b.json"}),
            "$defs": {
                "B": {"$id": "b.json", **of(z={"$ref": "#/$defs/Q"}), "$defs": {"Q": INTEGER}}
            },
        },
        {"c": {"z": 1}},
        {"c": {"z": ""}},
    ),
    "anchor": (
        {**of(c={"$ref": "#here"}), "$defs": {"C": {"$anchor": "here", **INTEGER}}},
        {"c": 1},
        {"c": ""},
    ),
    "a name": (
        of(**{"$ref": {"const": {"$ref": "#/$defs/C"}}}),
        {"$ref": {"$ref": "#/$defs/C"}},
        {"$ref": 1},
    ),
    "data": (
        of(c={"enum": [{"$ref": "#/none"}], "default": {"$ref": "#/none"}}),
        {"c": {"$ref": "#/none"}},
        {"c": 1},
    ),
}


@pytest.mark.parametrize("style", list(TOOL_FORMATS))
@pytest.mark.parametrize("name", list(SCHEMAS))
def test_references_mean_what_they_mean_in_the_schema(name: str, style: str) -> None:
    """The other tool defines the same names as something else."""
    schema, good, bad = SCHEMAS[name]
    other = {
        **of(c={"$ref": "#/$defs/C"}, x={"$ref": "#/definitions/a~1b"}),
        "$defs": {"C": {"const": "other"}, "N": {}, "B": {}},
        "definitions": {"a/b": {"const": "other"}},
    }
    theirs = {"c": "other", "x": "other"}
    for tools in ({"f": schema}, {"f": schema, "g": other}, {"g": other, "f": schema}):
        assert accepts(tools, style, [("f", good)])
        assert not accepts(tools, style, [("f", bad)])
        assert not accepts(tools, style, [("h", good)])
        if "g" in tools:
            assert accepts(tools, style, [("g", theirs)])
            assert not accepts(tools, style, [("g", good)])
            assert not accepts(tools, style, [("f", theirs)])


def test_lists_of_calls_are_written_in_one_way() -> None:
    tools = {"f": of(x=INTEGER), "g": of(y=INTEGER)}
    calls = [("f", {"x": 1}), ("g", {"y": 2}), ("f", {"x": 3})]
    assert accepts(tools, "mistral", calls)
    assert not accepts(tools, "mistral", [])


@pytest.mark.parametrize(
    ("reference", "problem"),
    [("#/$defs/none", "Pointer '/\\$defs/none' does not exist"), ("https://x.org/a", "x.org/a")],
)
def test_a_reference_to_nothing_is_refused_by_the_tools_name(reference: str, problem: str) -> None:
    with pytest.raises(ConstraintError, match=f"parameters of tool 'g' cannot be .*{problem}"):
        accepts({"f": of(x=INTEGER), "g": of(c={"$ref": reference})}, "hermes", [])


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_nested_model_is_a_tool(client: Any, stream: bool) -> None:
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
        [call] = [call.function for call in calls]
        model: Any = Trip if call.name == "Trip" else City
        assert model.model_validate_json(call.arguments)
