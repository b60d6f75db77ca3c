"""A field that no API has is refused by name or listed as ignored, wherever it is in a request."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.models.scripted import ByteTokenizer  # noqa: E402
from server_client import CHAT, COMPLETIONS, FILL_IN, RESPONSES, Client, served  # noqa: E402
from server_models import TOWN, answering  # noqa: E402

#: Objects whose names are the client's: schemas, arguments, metadata, variables of the template.
FREE = {
    "arguments", "chat_template_kwargs", "input_schema", "json", "logit_bias", "metadata",
    "parameters", "schema",
}  # fmt: skip
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": TOWN}}
CALL = {
    "id": "1", "type": "function", "function": {"name": "f", "arguments": '{"town": "Rome"}'}
}  # fmt: skip
STRUCTURED = {"structured_outputs": {"json": {"type": "object"}, "max_string": 9}}
#: A valid request of every API, with every kind of object that it may contain.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "c"},
            ],
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
            "prediction": {"type": "content", "content": [{"type": "text", "text": "d"}]},
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], **STRUCTURED}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "structural_tag", "format": {
                "type": "sequence", "elements": [{"type": "const_string", "value": "a"}]}},
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [
                {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]},
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a"}],
            "resume": {"seed": 0, "samples": [{"number": 0, "tokens": [97]}]}}),
    (COMPLETIONS, {"prompt": "a", **STRUCTURED, "stream_options": {"include_usage": True},
                   "stream": True}),
    (FILL_IN, {"prompt": "a", **STRUCTURED}),
    (FILL_IN, {"prompt": "a", "response_format": {"type": "json_object"}}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}],
                 "summary": [{"type": "summary_text", "text": "d"}]},
                {"type": "message", "role": "assistant", "content": [
                    {"type": "output_text", "text": "e"}, {"type": "refusal", "refusal": "f"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "g"},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "2",
                 "output": [{"type": "input_text", "text": "h"}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": TOWN}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto",
                            "tools": [{"type": "function", "name": "f"}]},
            "reasoning": {"effort": None},
            "text": {"verbosity": None},
        },
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        },
    ),
    (RESPONSES, {"input": "a", **STRUCTURED}),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "c", "signature": "d"},
                    {"type": "redacted_thinking", "data": "e"},
                    {"type": "text", "text": "f"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"town": "Rome"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1",
                     "content": [{"type": "text", "text": "g"}]}]},
            ],
            "tools": [{"name": "f", "input_schema": TOWN}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "a"}],
            "output_config": {
                "effort": None, "format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
    ),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}],
                      **STRUCTURED}),
    (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"function": {"name": "f", "arguments": {"town": "Rome"}}}]},
                {"role": "tool", "tool_name": "f", "content": "b"},
            ],
            "tools": [FUNCTION],
            "options": {"num_predict": 9},
        },
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}],
                   "options": {"num_predict": 9, **STRUCTURED}}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 9, **STRUCTURED}}),
]  # fmt: skip


def with_wings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of `value` with an unknown field in one of its objects, and the path of the object."""
    if isinstance(value, dict):
        yield path, {**value, "wings": 2}
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in members:
        is_free = name in FREE or (name == "input" and isinstance(inner, dict))
        if isinstance(inner, (dict, list)) and not is_free:
            for where, changed in with_wings(inner, f"{path}.{name}".lstrip(".")):
                other = copy.copy(value)
                other[name] = changed
                yield where, other


CASES = [
    pytest.param(path, where, body, id=f"{path.rpartition('/')[2]}-{number}-{where or 'body'}")
    for number, (path, request) in enumerate(REQUESTS)
    for where, body in with_wings(request)
]


@pytest.fixture(scope="module")
def tool_client() -> Iterator[Client]:
    with answering(b"{}", ByteTokenizer()) as llm, served(llm, tool_parser="hermes") as client:
        yield client


def ignored(text: str) -> list[str]:
    """The fields that an answer, or the lines or events of a stream, lists as ignored."""
    # Not splitlines: texts that are not escaped may hold other line separators.
    lines = [line.removeprefix("data: ") for line in text.split("\n") if "anydecode" in line]
    [found] = [json.loads(line) for line in lines]
    names: list[str] = found["anydecode"].get("ignored", [])
    return names


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_requests_without_unknown_fields_are_accepted(tool_client: Client, number: int) -> None:
    path, request = REQUESTS[number]
    answer = tool_client.http.post(path, json=request)
    assert answer.status_code == 200, answer.text
    assert ignored(answer.text) == []


@pytest.mark.parametrize("path, where, body", CASES)
def test_unknown_fields_are_refused_or_listed(
    tool_client: Client, path: str, where: str, body: dict[str, Any]
) -> None:
    answer = tool_client.http.post(path, json=body)
    if answer.status_code == 400:
        assert "wings" in str(answer.json()["error"])
        return
    assert answer.status_code == 200, answer.text
    plain = [part for part in where.split(".") if part and not part.isdecimal()]
    assert ignored(answer.text) == [".".join([*plain, "wings"])]
