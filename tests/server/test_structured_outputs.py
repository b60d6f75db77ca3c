"""Constraints of answers per request: every kind, on every endpoint that generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, served  # noqa: E402
from server_constraints import KINDS, SCHEMA, TAG, is_valid  # noqa: E402


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with scripted_llm() as llm, served(llm) as client:
        yield client


def text_of(path: str, response: dict[str, Any]) -> str:
    if path == CHAT:
        return str(response["choices"][0]["message"]["content"])
    if path == COMPLETIONS:
        return str(response["choices"][0]["text"])
    return str(response["output"][0]["content"][0]["text"])


def streamed_text(path: str, chunks: list[dict[str, Any]]) -> str:
    if path == RESPONSES:
        return "".join(chunk["delta"] for chunk in chunks if chunk["type"].endswith("text.delta"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        one["text"] if path == COMPLETIONS else one["delta"].get("content") or "" for one in choices
    )


def limit(path: str, count: int = 200) -> dict[str, Any]:
    return {"max_output_tokens" if path == RESPONSES else "max_tokens": count, "seed": 3}


@pytest.mark.one_in(2)  # each constraint and each endpoint
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("kind", KINDS)
def test_every_constraint_reaches_every_endpoint(client: Client, path: str, kind: str) -> None:
    field, check = KINDS[kind]
    text = text_of(path, client.ask(path, **limit(path), structured_outputs=field))
    assert check(text), text
    chunks = client.chunks(path, **limit(path), structured_outputs=field)
    assert streamed_text(path, chunks) == text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_structural_tag_as_format_is_that_of_structured_outputs(
    client: Client, path: str
) -> None:
    given = {"type": "structural_tag", **TAG}
    fields = {"text": {"format": given}} if path == RESPONSES else {"response_format": given}
    text = text_of(path, client.ask(path, **limit(path), **fields))
    assert text == text_of(
        path, client.ask(path, **limit(path), structured_outputs={"structural_tag": TAG})
    )
    assert text != text_of(path, client.ask(path, **limit(path)))


def test_a_schema_beside_json_object_is_kept(client: Client) -> None:
    given = {"type": "json_object", "schema": SCHEMA}
    assert is_valid(text_of(CHAT, client.ask(CHAT, **limit(CHAT), response_format=given)))


def test_limits_of_json_are_off_unless_asked_for(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    given = {"json_schema": {"name": "n", "schema": schema}, "type": "json_schema"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    def guards(path: str, **fields: Any) -> dict[str, Any]:
        response = client.ask(path, **limit(path, 40), **fields)
        found: dict[str, Any] = response["anydecode"]["constraint"]["guards"]
        return {name: found[name] for name in ("max_string", "extra_properties", "whitespace")}

    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    requests: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, {"response_format": given}),
        (COMPLETIONS, {"response_format": given}),
        (RESPONSES, {"text": text}),
        (CHAT, {"structured_outputs": {"json": schema}}),
        (CHAT, {"tools": tools, "tool_choice": "required"}),
    )
    asked = {
        "max_string": 5, "disable_additional_properties": True, "disable_any_whitespace": True,
    }  # fmt: skip
    for path, fields in requests:
        found = guards(path, **fields)
        assert (found["max_string"], found["extra_properties"]) == (None, True)
        more = {**fields.get("structured_outputs", {}), **asked}
        found = guards(path, **{**fields, "structured_outputs": more})
        assert found == {"max_string": 5, "extra_properties": False, "whitespace": ""}


def test_unusable_constraints_are_refused_in_one_line(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "an answer has one constraint"),
        (both, "structured_outputs.regex and response_format are given"),
        ({"structured_outputs": {"regex": "a"}, "tools": tools}, "use response_format beside"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "needs a format, or structures"),
        ({"response_format": {"type": "structural_tag"}}, "needs a format, or structures"),
        ({"response_format": {"type": "json_object", "shema": {}}}, "unknown field shema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "needs a schema object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "unknown field x",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "unknown field schema"),
        (
            {"response_format": {"type": "structural_tag", **TAG}, "tools": tools},
            "structural_tag and tools are given",
        ),
        (
            {**both, "response_format": {"type": "structural_tag", **TAG}},
            "an answer has one constraint",
        ),
        ({"structured_outputs": {"regex": "("}}, ""),
        ({"structured_outputs": {"grammar": "start: x"}}, ""),
        ({"structured_outputs": {"choice": []}}, "at least one option"),
        ({"structured_outputs": {"json": "{"}}, "not valid JSON"),
        ({"structured_outputs": {"json": False}}, "no text can satisfy the schema false"),
        ({"structured_outputs": {"max_string": -1}}, "max_string"),
    )
    for fields, problem in cases:
        message = client.refused(CHAT, **fields)["message"]
        assert problem in message and "\n" not in message
