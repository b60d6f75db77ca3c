"""Errors of bodies: one line with the field, what it must be, and what was given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.server.field_errors import _PATTERNS  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client  # noqa: E402

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (CHAT, {"messages": None}, "messages must be a list", "messages"),
        (CHAT, {"messages": []}, "messages is empty", "messages"),
        (
            CHAT,
            {"messages": [5]},
            'messages.0 must be an object, such as {"role": "user", "content": "Hello"}, not 5',
            "messages.0",
        ),
        (
            CHAT,
            {"prediction": "a"},
            'prediction must be an object, such as {"type": "content", "content": "expected text"}',
            "prediction",
        ),
        (
            CHAT,
            {"stream_options": [1]},
            'stream_options must be an object, such as {"include_usage": true}',
            "stream_options",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "tools": {"name": "a"}},
            'tools must be a list, such as [{"type": "function", "function": {"name":',
            "tools",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": True}]},
            "messages.0.content must be a string or a list, not true",
            "messages.0.content",
        ),
        (CHAT, {"logprobs": 3}, "logprobs must be true or false, not 3", "logprobs"),
        (
            CHAT,
            {"thinking_token_budget": 3, "max_thinking_tokens": 4},
            "max_thinking_tokens and thinking_token_budget are the same field",
            "max_thinking_tokens",
        ),
        (
            CHAT,
            {"prediction": {"type": "content", "content": "a", "b": 1}},
            "unknown field",
            "prediction.b",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "a content part has no type",
            "messages",
        ),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]},
            "tools has 2 functions called 'f'",
            "tools",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice requires a call", "tool_choice"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "schema": {"type": "x"}}},
            "",
            "response_format",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"regex": "(?=a)"}},
            "",
            "structured_outputs.regex",
        ),
        (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": {"$ref": "#/a"}}}]},
            "",
            "tools",
        ),
        ("/v1/embeddings", {"input": []}, "input is empty", "input"),
        (CHAT, {"stream": "yes"}, "stream must be true or false", "stream"),
        (CHAT, {"temperature": "hot"}, "temperature must be a number, between 0", "temperature"),
        (CHAT, {"temperature": -1}, "temperature must be between 0", "temperature"),
        (CHAT, {"top_logprobs": 50}, "top_logprobs must be 20 or less, not 50", "top_logprobs"),
        (CHAT, {"model": "x" * 5000}, "model must be a string of at most 1000", "model"),
        (CHAT, {"stop": 5}, "stop must be a string or a list, not 5", "stop"),
        (
            CHAT,
            {"logit_bias": {"a": 1}},
            "the name 'a' in logit_bias must be an integer",
            "logit_bias.a",
        ),
        (
            CHAT,
            {"logit_bias": {"7" * 30_000: 1}},
            "the name '777",
            f"logit_bias.{'7' * 106}...",
        ),
        (
            CHAT,
            {"prediction": {"type": "content"}},
            "prediction.content is required",
            "prediction.content",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            'tools.0.function.name must be a string of letters, digits, "_", "." and "-"',
            "tools.0.function.name",
        ),
        (
            CHAT,
            {"chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs: 'messages' is not a variable of the template",
            "chat_template_kwargs",
        ),
        (COMPLETIONS, {"prompt": 5}, "prompt must be a string or a list, not 5", "prompt"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt.1 must be a string, not 5", "prompt.1"),
        (COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt.0.1 must be an integer", "prompt.0.1"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt.0 must be 0 or more, not -1", "prompt.0"),
        (
            RESPONSES,
            {"metadata": {str(number): "a" for number in range(17)}},
            "metadata must have at most 16 items",
            "metadata",
        ),
        (
            RESPONSES,
            {"truncation": "x"},
            "truncation must be 'auto' or 'disabled'",
            "truncation",
        ),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"txt": "b"}]},
            "documents.0.text is required",
            "documents.0.text",
        ),
        (
            "/v1/batches",
            {"input_file_id": "a", "endpoint": CHAT, "completion_window": "1y"},
            "completion_window must be a number with the unit s, m, h or d, of at most 30d",
            "completion_window",
        ),
        ("/tokenize", {"prompt": "a", "text": 1}, "unknown field text", "text"),
        ("/tokenize", {"prompt": {"a": 1}}, "prompt must be a string", "prompt"),
    ],
)
def test_the_error_of_a_field(
    client: Client, path: str, fields: dict[str, Any], message: str, param: str
) -> None:
    base: dict[str, Any] = {CHAT: {"messages": MESSAGES}}.get(path, {})
    answer = client.http.post(path, json={**base, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message), error
    assert "\n" not in error["message"]
    assert error["param"] == param


def test_the_error_of_a_parameter_in_the_address(client: Client) -> None:
    answer = client.http.get(f"{RESPONSES}/resp_1/input_items", params={"limit": "many"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["message"], error["param"]) == ("limit must be an integer", "limit")


def test_the_error_of_a_value_that_the_engine_refuses_names_its_field(client: Client) -> None:
    error = client.refused(COMPLETIONS, resume={"seed": 1, "samples": []}, seed=2)
    assert error["param"] == "seed"
    error = client.refused(COMPLETIONS, n=65)
    assert "n" in error["message"] and error["param"] == "n"


def test_an_endpoint_that_does_not_exist_is_named(client: Client) -> None:
    for path, is_known in (("/v1/nope", False), (CHAT, True)):
        error = client.http.get(path).json()["error"]["message"]
        end = "the path allows POST" if is_known else "GET /openapi.json lists all"
        assert error == f"there is no endpoint GET {path}; {end}"


def test_the_schema_of_the_api_lists_only_statuses_that_are_given(client: Client) -> None:
    for _ in range(2):  # built, then kept
        paths = client.http.get("/openapi.json").json()["paths"]
        statuses = {
            status
            for operations in paths.values()
            for operation in operations.values()
            for status in operation["responses"]
        }
        assert "422" not in statuses and {"200", "400", "404"} <= statuses


def test_all_patterns_of_fields_are_described(client: Client) -> None:
    document = client.http.get("/openapi.json").text
    patterns = set(re.findall(r'"pattern":"((?:[^"\\]|\\.)*)"', document))
    assert {json.loads(f'"{pattern}"') for pattern in patterns} == set(_PATTERNS)
