"""Anthropic's API: requests are translated, and answers are those of the engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.models.scripted import ByteTokenizer, ScriptedModel  # noqa: E402
from anydecode.server.anthropic.prompts import translate  # noqa: E402
from anydecode.server.anthropic.protocol import CountTokensRequest  # noqa: E402
from anydecode.server.prompts import conversation  # noqa: E402
from server_client import Client, events, served  # noqa: E402
from server_models import THINKING, TOWN, TemplateTokenizer, answering  # noqa: E402

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
RENDERED = "user: the cat sat on the mat and the cat sat on\nassistant: "
TOOL = {"name": "weather", "input_schema": TOWN, "cache_control": {"type": "ephemeral"}}


def post(client: Client, path: str = MESSAGES, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 8, "temperature": 0, **fields}
    answer = client.http.post(
        path, json={name: value for name, value in body.items() if value is not None}
    )
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": ASK, "max_tokens": 8, "temperature": 0, "stream": True, **fields}
    answer = client.http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    found = list(events(lines))
    assert [line[7:] for line in lines if line.startswith("event: ")] == [
        event["type"] for event in found
    ]
    return found


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events are in order."""
    assert [found[0]["type"], found[1]["type"]] == ["message_start", "ping"]
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message = dict(found[0]["message"])
    assert message["stop_reason"] is None and message["content"] == []
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta = dict(event["delta"])
        kind = delta.pop("type")
        names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json",
                 "signature_delta": "signature"}  # fmt: skip
        (value,) = delta.values()
        blocks[-1][names[kind]] += value
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if text:
            block["input"] = json.loads(text)
    message["content"] = blocks
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"]}


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}])
def test_a_message_is_the_text_of_the_engine(
    client: Client, llm: LLM, options: dict[str, Any]
) -> None:
    alone = llm.generate(RENDERED, max_tokens=24, **options)
    for message in (
        post(client, max_tokens=24, model="scripted", **options),
        assembled(stream(client, max_tokens=24, **options)),
    ):
        assert message["id"].startswith("msg_")
        assert (message["type"], message["role"]) == ("message", "assistant")
        assert message["model"] == "scripted"
        assert message["content"] == [{"type": "text", "text": alone.text}]
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(RENDERED)
        assert usage["output_tokens"] == len(alone.tokens)
        assert message["stop_reason"] == (
            "max_tokens" if alone.finish_reason == "length" else "end_turn"
        )


def test_the_usage_of_a_cached_prompt_is_that_of_the_engine() -> None:
    with scripted_llm() as llm, served(llm) as client:
        first = post(client)["usage"]
        assert (first["input_tokens"], first["cache_read_input_tokens"]) == (len(RENDERED), 0)
        cached = llm.generate(RENDERED, max_tokens=8).stats.num_cached_tokens
        assert cached > 0
        found = stream(client)
        expected = {"input_tokens": len(RENDERED) - cached, "cache_read_input_tokens": cached}
        for usage in (found[0]["message"]["usage"], found[-2]["usage"], post(client)["usage"]):
            assert expected.items() <= usage.items()


def test_stop_reasons(client: Client, llm: LLM) -> None:
    text = llm.generate(RENDERED, max_tokens=24).text
    stop = text[5:7]
    fields: dict[str, Any] = {"max_tokens": 24, "stop_sequences": ["not in it", stop]}
    for message in (post(client, **fields), assembled(stream(client, **fields))):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
        assert message["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    with answering(b"yes") as ending, served(ending) as other:
        ask = [{"role": "user", "content": "abc"}]
        for limit, reason in ((4, "end_turn"), (3, "max_tokens")):
            message = post(other, messages=ask, max_tokens=limit)
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
            assert message["content"] == [{"type": "text", "text": "yes"}]
    long = [{"role": "user", "content": "a" * (llm.max_length - len("user: \nassistant: ") - 2)}]
    message = post(client, messages=long, max_tokens=9, ignore_eos=True)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "tool"]
)
def test_tools_are_called(client: Client, choice: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 200,
    }  # fmt: skip
    message, streamed = post(client, **fields), assembled(stream(client, **fields))
    for found in (message, streamed):
        (block,) = found["content"]
        assert block["type"] == "tool_use" and block["id"].startswith("toolu_")
        assert block["name"] == "weather" and block["input"]["town"] in ("Oslo", "Rome")
        assert found["stop_reason"] == "tool_use"
    assert without_ids(message["content"]) == without_ids(streamed["content"])


def test_parallel_calls_are_blocks_of_their_own() -> None:
    calls = "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"town": "{town}"}}}}\n</tool_call>'
        for town in ("Oslo", "Rome")
    )
    with answering(f"I ask.{calls}".encode(), TemplateTokenizer(THINKING)) as llm:
        with served(llm, reasoning_parser="none") as client:
            fields: dict[str, Any] = {
                "messages": [{"role": "user", "content": "abc"}], "max_tokens": 300,
                "tools": [TOOL], "tool_choice": {"type": "auto"},
            }  # fmt: skip
            llm.tokenizer.chat_template += "{{ tools }}"[:0]
            for message in (post(client, **fields), assembled(stream(client, **fields))):
                kinds = [block["type"] for block in message["content"]]
                assert kinds == ["text", "tool_use", "tool_use"], message
                assert message["content"][0]["text"] == "I ask."
                inputs = [block["input"] for block in message["content"][1:]]
                assert inputs == [{"town": "Oslo"}, {"town": "Rome"}]


def test_a_call_that_is_cut_has_what_is_complete(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "b" * 99}}, "required": ["a"]}
    fields: dict[str, Any] = {
        "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"},
        "max_tokens": 60,
    }  # fmt: skip
    message = post(client, **fields)
    (block,) = message["content"]
    assert message["stop_reason"] == "max_tokens"
    assert block["input"].get("a", "") == "b" * len(block["input"].get("a", ""))
    partial = "".join(
        event["delta"]["partial_json"]
        for event in stream(client, **fields)
        if event["type"] == "content_block_delta"
    )
    assert partial.startswith('{"a": "b')


def test_reasoning_is_a_thinking_block() -> None:
    ask = [{"role": "user", "content": "abc"}]
    fields: dict[str, Any] = {"messages": ask, "max_tokens": 40}
    with answering(b"hm</think>yes", TemplateTokenizer(THINKING)) as llm, served(llm) as client:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        for message in (
            post(client, **fields, thinking=thinking),
            assembled(stream(client, **fields, thinking=thinking)),
        ):
            signature = message["content"][0].pop("signature")
            assert signature
            assert message["content"] == [
                {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}
            ]  # fmt: skip
            assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
        message = post(client, **fields, thinking={"type": "enabled", "budget_tokens": 1})
        assert message["content"][0]["thinking"] == "h"
        assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
        assert "ignored" not in message["anydecode"]
        omitted = {"type": "adaptive", "display": "omitted"}
        for message in (
            post(client, **fields, thinking=omitted),
            assembled(stream(client, **fields, thinking=omitted)),
        ):
            assert [block.get("thinking") for block in message["content"]] == ["", None]
        message = post(client, COUNT, messages=ask, max_tokens=None)
        assert message == {"input_tokens": len("abc<think>")}
        message = post(client, COUNT, messages=ask, max_tokens=None, thinking={"type": "disabled"})
        assert message == {"input_tokens": len("abc<think></think>")}


def test_thinking_is_listed_as_ignored_without_a_template_for_it(client: Client) -> None:
    for kind, ignored in (("disabled", ["thinking"]), ("adaptive", None)):
        assert post(client, thinking={"type": kind})["anydecode"].get("ignored") == ignored


def test_fields_without_effect_are_listed(client: Client) -> None:
    fields = {
        "metadata": {"user_id": "a"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral"},
        "output_config": {"effort": "low"},
    }
    found = post(client, **fields)["anydecode"]["ignored"]
    assert found == ["cache_control", "metadata", "output_config.effort"]


def test_fields_of_tools_without_effect_are_listed(client: Client) -> None:
    unread = {"defer_loading": True, "eager_input_streaming": True, "input_examples": [{"a": 1}]}
    tool = {**TOOL, **unread, "cache_control": {"type": "ephemeral"}, "strict": True}
    found = post(client, tools=[tool], tool_choice={"type": "none"})["anydecode"]
    assert found["ignored"] == sorted(f"tools.{name}" for name in unread)


def test_fields_of_blocks_without_effect_are_listed(client: Client) -> None:
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "x": None}
    found = post(client, messages=[{"role": "user", "content": [block]}], system=[block])
    assert "ignored" not in found["anydecode"]
    for path, fields in (
        ("messages.content", {"messages": [{"role": "user", "content": [{**block, "x": 1}]}]}),
        ("system", {"system": [{**block, "x": 1}]}),
    ):
        assert post(client, **fields)["anydecode"]["ignored"] == [f"{path}.x"]


def test_json_schemas_are_enforced(client: Client) -> None:
    config = {"format": {"type": "json_schema", "schema": TOWN}}
    message = post(client, output_config=config, max_tokens=60)
    assert json.loads(message["content"][0]["text"])["town"] in ("Oslo", "Rome")


def test_options_of_the_engine_are_accepted(client: Client, llm: LLM) -> None:
    alone = llm.generate(RENDERED, max_tokens=24, temperature=1.0, top_k=3, seed=2)
    options = {"max_tokens": 24, "temperature": 1.0, "top_k": 3, "seed": 2}
    message = post(client, **options, decoder="prompt-lookup", trace=True)
    assert message["content"][0]["text"] == alone.text
    assert message["anydecode"]["decoder"] == "prompt-lookup" and message["anydecode"]["trace"]


def test_tokens_are_counted(client: Client) -> None:
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    found = post(client, COUNT, system=system, max_tokens=None)
    assert found == {"input_tokens": len("system: be brief\n" + RENDERED)}
    generated = post(client, system="be brief", max_tokens=1)["usage"]
    total = generated["input_tokens"] + generated["cache_read_input_tokens"]
    assert found == {"input_tokens": total}


def test_blocks_become_messages() -> None:
    body = CountTokensRequest.model_validate(
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "b", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"d": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "is_error": True,
                     "content": [{"type": "text", "text": "e"}]},
                    {"type": "tool_result", "tool_use_id": "2"},
                    {"type": "text", "text": "f", "cache_control": {"type": "ephemeral"}},
                ]},
            ],
        }
    )  # fmt: skip
    request, ignored = translate(body, None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"d": 1}}}
    assert conversation(request.messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c", "reasoning_content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "e", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "f"},
    ]
    assert ignored == ["messages.content.is_error"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": []}, "messages is empty"),
        (user({"type": "image", "source": {}}), "messages.0.content.0 has type 'image'; this"),
        (user({"type": "document"}), "messages.0.content.0 has type 'document'; this"),
        (user({"type": "text"}), "messages.0.content.0 needs the field text, a string"),
        (user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
         "messages.0.content.0.content.0 has type 'image'; this server accepts text only here"),
        ({"messages": [*ASK, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "it has tool calls"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "unknown field name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools.0 has type 'web_search_20250305'; this server accepts custom tools only"),
        ({"tools": [{"name": "f"}]}, "tools.0 needs an input_schema"),
        ({"tools": [{**TOOL, "wings": 2}]}, "unknown field tools.0.wings"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires a call, but no tools are given"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}},
         "tool_choice.name is given with type auto; only tool has a name"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type must be 'auto', 'any'"),
        ({"thinking": {"type": "on"}}, "thinking.type must be 'enabled', 'disabled'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
        ({"thread": {"type": "create"}}, "thread is not supported here: no conversation is kept"),
        ({"wings": 2}, "unknown field wings"),
        ({"n": 2}, "n is 2; a message has exactly one answer"),
        ({"temperature": -1}, "temperature must be between 0 and 100, not -1"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_in_one_line(
    client: Client, fields: dict[str, Any], reason: str
) -> None:
    found = post(client, status=400, **fields)
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert reason in found["error"]["message"] and "\n" not in found["error"]["message"]
    if "max_tokens" not in fields:
        assert post(client, COUNT, 400, **{"max_tokens": None, **fields}) == found


def test_errors_are_anthropics(client: Client, llm: LLM) -> None:
    found = post(client, status=404, model="another")
    assert found["error"]["type"] == "not_found_error"
    answer = client.http.get(MESSAGES)
    assert answer.status_code == 405 and answer.json()["type"] == "error"
    with served(llm, api_keys=("one",), max_requests=0, max_body=200) as other:
        answer = other.http.post(MESSAGES, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "one"}, {"authorization": "Bearer one"}):
            headers["anthropic-version"] = "2023-06-01"
            answer = other.http.post(MESSAGES, json={}, headers=headers)
            assert answer.status_code == 429 and answer.headers["retry-after"]
            assert answer.json()["error"]["type"] == "rate_limit_error"
        for headers in ({"x-api-key": "two"}, {"x-api-key": "", "authorization": "Bearer two"}):
            assert other.http.post(MESSAGES, json={}, headers=headers).status_code == 401
        answer = other.http.post(MESSAGES, content=b" " * 300, headers={"x-api-key": "one"})
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"


def test_an_error_within_a_stream_is_an_event() -> None:
    def script(path: tuple[int, ...]) -> Any:
        if len(path) > len(RENDERED) + 3:
            raise RuntimeError("broken")
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        logits[97] = 30.0
        return logits

    with LLM(ScriptedModel(script), tokenizer=ByteTokenizer()) as llm, served(llm) as client:
        found = stream(client, max_tokens=20, decoder="autoregressive")
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] in ("api_error", "overloaded_error")
    assert "broken" not in found[-1]["error"]["message"]


def test_references_without_a_fragment_are_read_within_the_schema() -> None:
    """As litellm writes them for typed answers."""
    place = {"type": "object", "properties": {"at": {"$ref": "/$defs/Point"}}}
    schema = {"properties": {"place": place}, "$defs": {"Point": {"type": "integer"}}}
    body = CountTokensRequest.model_validate(
        {"messages": ASK, "tools": [{"name": "f", "input_schema": schema}]}
    )
    (tool,) = translate(body, None)[0].tools or []
    assert tool.function.parameters["properties"]["place"]["properties"] == {
        "at": {"$ref": "#/$defs/Point"}
    }
