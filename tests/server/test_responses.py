"""The endpoint `/v1/responses`: items, events, tools, reasoning and invalid requests."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel  # noqa: E402
from anydecode.server.responses.items import complete_items, messages_of  # noqa: E402
from replaying import replaying_llm  # noqa: E402
from server_client import CHAT, RESPONSES, Client, served  # noqa: E402

ANSWER = b"yes"
GREEDY: dict[str, Any] = {"temperature": 0, "decoder": "autoregressive"}
CALLS = [("forecast", {"days": [1, 2], "town": "Tromsø"}), ("go", {"to": 'a \\ "b"'})]
THOUGHT, WORDS = "Which town? That one.", "Let me look.\n"
TEXT = WORDS + TOOL_FORMATS["hermes"].render(CALLS)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": name,
        "description": f"Does {name}.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }
    for name, properties in {
        "forecast": {
            "days": {"type": "array", "items": {"type": "integer"}},
            "town": {"type": "string"},
        },
        "go": {"to": {"type": "string"}},
    }.items()
]
EVENT_TYPES = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def answering() -> LLM:
    """A model that answers with `ANSWER` and the end of the text."""
    start = len("user: abc\nassistant: ")

    def script(path: tuple[int, ...]) -> Any:
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        logits[[*ANSWER, EOS][len(path) - start]] = 30.0
        return logits

    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer())


def final_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last response of a stream, whose events are checked: by OpenAI's types, by their order,
    and against the response."""
    for number, event in enumerate(events):
        EVENT_TYPES[event["type"]].model_validate(event)
        assert event["sequence_number"] == number
    types = [event["type"].removeprefix("response.") for event in events]
    num_first = 3 if events[0]["response"]["background"] else 2
    assert types[:num_first] in (["created", "in_progress"], ["created", "queued", "in_progress"])
    response = events[-1]["response"]
    Response.model_validate(response)
    assert types[-1] == response["status"]
    texts = {"message": "output_text", "reasoning": "reasoning_text"}
    expected = []
    for index, item in enumerate(response["output"]):
        own = [one for one in events if one.get("output_index") == index]
        added, done = own[0], own[-1]
        assert done["item"] == item and added["item"]["id"] == item["id"]
        assert added["item"]["status"] == "in_progress"
        assert {one["item_id"] for one in own[1:-1]} == {item["id"]}
        deltas = [one["delta"] for one in own if one["type"].endswith(".delta")]
        if item["type"] == "function_call":
            name = "function_call_arguments"
            assert "".join(deltas) == item["arguments"] == own[-2]["arguments"]
            kinds = [f"{name}.delta"] * len(deltas) + [f"{name}.done"]
        else:
            name = texts[item["type"]]
            [part] = item["content"]
            assert own[-2]["part"] == part
            assert "".join(deltas) == part["text"] == own[-3]["text"]
            kinds = ["content_part.added", *[f"{name}.delta"] * len(deltas), f"{name}.done"]
            kinds.append("content_part.done")
        expected += ["output_item.added", *kinds, "output_item.done"]
    assert types[num_first:-1] == expected
    return response


def plain(response: dict[str, Any]) -> list[tuple[str, ...]]:
    """The output without ids: type, status and texts."""
    result = []
    for item in response["output"]:
        if item["type"] == "function_call":
            texts = (item["name"], item["arguments"])
        else:
            texts = tuple(part["text"] for part in item["content"])
        result.append((item["type"], item["status"], *texts))
    return result


def both(client: Client, llm: LLM, **fields: Any) -> dict[str, Any]:
    """The response, which is the same as a stream whose tokens arrive one by one."""
    whole = client.ask(RESPONSES, **GREEDY, **fields)
    Response.model_validate(whole)
    events = client.single_chunks(llm, RESPONSES, **GREEDY, **fields)
    streamed = final_response(events)
    assert plain(streamed) == plain(whole)
    for name in ("status", "incomplete_details", "tools", "text", "metadata"):
        assert streamed[name] == whole[name]
    return whole


@pytest.mark.parametrize(
    ("limit", "status", "details", "text"),
    [
        (2, "incomplete", {"reason": "max_output_tokens"}, "ye"),
        (3, "incomplete", {"reason": "max_output_tokens"}, "yes"),
        (4, "completed", None, "yes"),
    ],
)
def test_a_response_that_the_limit_cuts_is_incomplete(
    limit: int, status: str, details: dict[str, str] | None, text: str
) -> None:
    with answering() as llm, served(llm) as client:
        response = both(client, llm, max_output_tokens=limit)
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert plain(response) == [("message", status, text)]
    assert response["usage"]["output_tokens"] == limit


def test_the_deltas_of_a_stream_are_sent_as_they_come() -> None:
    fields: dict[str, Any] = {**GREEDY, "max_output_tokens": 12, "ignore_eos": True}
    with scripted_llm() as llm, served(llm) as client:
        events = client.single_chunks(llm, RESPONSES, **fields)
    final_response(events)
    assert len([one for one in events if one["type"] == "response.output_text.delta"]) >= 3


@pytest.mark.slow
def test_reasoning_text_and_calls_are_items() -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "max_output_tokens": 400}
    with replaying_llm(f"<think>{THOUGHT}</think>{TEXT}") as llm, served(llm) as client:
        response = both(client, llm, **fields)
        assert plain(response) == [
            ("reasoning", "completed", THOUGHT),
            ("message", "completed", WORDS),
            *(
                ("function_call", "completed", name, json.dumps(arguments, ensure_ascii=False))
                for name, arguments in CALLS
            ),
        ]
        calls = response["output"][2:]
        assert len({call["call_id"] for call in calls}) == 2
        assert response["tools"] == TOOLS and response["tool_choice"] == "auto"
        usage = response["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len(f"<think>{THOUGHT}")
        events = client.single_chunks(llm, RESPONSES, **GREEDY, **fields)
        name = "response.function_call_arguments.delta"
        deltas = [event["delta"] for event in events if event["type"] == name]
        assert len(deltas) > 20 and max(map(len, deltas)) < 10


def test_the_answer_is_that_of_a_conversation() -> None:
    tools = [
        {
            "type": "function",
            "function": {name: tool[name] for name in ("name", "description", "parameters")},
        }
        for tool in TOOLS
    ]
    with scripted_llm() as llm, served(llm) as client:
        for choice in ("auto", "required", {"type": "function", "name": "go"}):
            shared = {"seed": 3, "tool_choice": choice, "parallel_tool_calls": False}
            message = client.ask(CHAT, **shared, tools=tools, max_tokens=200)["choices"][0][
                "message"
            ]
            response = client.ask(RESPONSES, **shared, tools=TOOLS, max_output_tokens=200)
            found = [
                item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                for item in response["output"]
            ]
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            assert found == [text for text in (message["content"], *calls) if text is not None]
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
        named = {"name": "n", "schema": schema}
        chat_format = {"type": "json_schema", "json_schema": named}
        message = client.ask(CHAT, seed=4, response_format=chat_format, max_tokens=200)
        text = {"format": {"type": "json_schema", **named}}
        response = client.ask(RESPONSES, seed=4, text=text, max_output_tokens=200)
        assert plain(response)[0][2] == message["choices"][0]["message"]["content"]
        assert response["text"]["format"] == text["format"]


@pytest.mark.parametrize("validated", [False, True])
def test_the_token_limit_cuts_a_call(validated: bool) -> None:
    tools = json.loads(json.dumps(TOOLS))
    if validated:
        tools[0]["parameters"]["properties"]["days"]["uniqueItems"] = True
    limit = TEXT.encode().index(b"Troms")
    with replaying_llm(TEXT) as llm, served(llm) as client:
        response = both(client, llm, tools=tools, max_output_tokens=limit)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    arguments = '{"days": [1, 2], "town": "'
    assert plain(response) == [
        ("message", "completed", WORDS),
        ("function_call", "incomplete", "forecast", arguments),
    ]


def test_reasoning_that_the_limit_cuts_has_no_message() -> None:
    with replaying_llm(f"<think>{THOUGHT}</think>yes") as llm, served(llm) as client:
        response = both(client, llm, max_output_tokens=15)
        assert plain(response) == [("reasoning", "incomplete", THOUGHT[:8])]
    with replaying_llm(f"<think>{THOUGHT}</think>") as llm, served(llm) as client:
        response = both(client, llm, max_output_tokens=100)
        assert plain(response)[1:] == [("message", "completed", "")]


@pytest.mark.slow
def test_logprobs_are_those_of_the_text() -> None:
    text = f"<think>{THOUGHT}</think>{TEXT}"
    fields = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with replaying_llm(text) as llm, served(llm) as client:
        response = client.ask(RESPONSES, **GREEDY, **fields, max_output_tokens=400)
        entries = response["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries) == WORDS
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert "ignored" not in response["anydecode"]
        events = client.single_chunks(llm, RESPONSES, **GREEDY, **fields, max_output_tokens=400)
        final = final_response(events)
        assert final["output"][1]["content"][0]["logprobs"] == entries
        deltas = [one["logprobs"] for one in events if one["type"].endswith("output_text.delta")]
        assert sum(deltas, []) == entries
        plain_response = client.ask(RESPONSES, **GREEDY, top_logprobs=2)
        assert plain_response["output"][0]["content"][0]["logprobs"] == []
        assert plain_response["anydecode"]["ignored"] == ["top_logprobs"]


def test_items_become_messages() -> None:
    items = complete_items(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{"},
            {"type": "function_call_output", "call_id": "2", "output": "c"},
            {"type": "function_call_output", "call_id": "1",
             "output": [{"type": "input_text", "text": "d"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "yes"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        ]
    )  # fmt: skip
    assert all(isinstance(item["id"], str) for item in items)
    assert [item["id"] for item in items[2:4]] == ["rs_1", "msg_1"]
    messages = [one.model_dump(exclude_none=True) for one in messages_of(items, "Be good.")]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{"}},
    ]
    assert messages == [
        {"role": "system", "content": "Be good."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "aa"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "c", "tool_call_id": "2", "name": "g"},
        {"role": "tool", "content": "d", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "yes", },
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]  # fmt: skip


def test_the_tokens_of_an_input_are_counted() -> None:
    with scripted_llm() as llm, served(llm) as client:
        items = [{"role": "user", "content": "abc"}, CALL]
        fields: dict[str, Any] = {"input": items, "tools": TOOLS, "instructions": "Be brief."}
        count = client.http.post(f"{RESPONSES}/input_tokens", json=fields).json()
        usage = client.ask(RESPONSES, **fields)["usage"]
        assert count == {
            "object": "response.input_tokens",
            "input_tokens": usage["input_tokens"],
        }


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", "the input is empty"),
    "empty input": ({"input": []}, "input", "the input is empty"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "type 'input_image'",
    ),
    "item": ({"input": [{"type": "web_search_call", "id": "1"}]}, "input", "'web_search_call'"),
    "item type": ({"input": [{"type": ["message"]}]}, "input", "type ['message']"),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input", "the role is 'tool'"),
    "content": ({"input": [{"role": "user", "content": 3}]}, "input", "text or a list of parts"),
    "call": ({"input": [{**CALL, "arguments": {}}]}, "input", "needs the field arguments"),
    "output": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "2", "output": "a"}]},
        "input",
        "no function_call has the call_id '2'",
    ),
    "id": ({"input": [{**CALL, "id": "a" * 300}]}, "input", "at most 256 bytes"),
    "web search": ({"tools": [{"type": "web_search"}]}, "tools", "type 'web_search'"),
    "nameless tool": ({"tools": [{"type": "function"}]}, "tools", "a tool's name"),
    "parameters": (
        {"tools": [{"type": "function", "name": "f", "parameters": 1}]},
        "tools",
        "a tool's parameters",
    ),
    "tool choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice", "must be function or"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format has type 'xml'"),
    "text": ({"text": {"size": 1}}, "text.size", "unknown field text.size"),
    "reasoning": ({"reasoning": {"a": 1}}, "reasoning.a", "unknown field reasoning.a"),
    "field": ({"wings": 2}, "wings", "unknown field wings"),
    "include": ({"include": ["wings"]}, "include.0", "include.0"),
    "metadata": ({"metadata": {"a": "b" * 513}}, "metadata.a", "512"),
    "metadata size": ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "not supported here"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", "not supported here"),
    "n": ({"n": 2}, "n", "exactly one answer"),
    "logprobs": ({"logprobs": 2}, "logprobs", "send include"),
    "background": ({"background": True, "store": False}, "store", "has to be stored"),
    "long": ({"input": "a" * 5000}, "", "maximum context length"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_invalid_requests_are_refused_in_one_line(name: str, client: Client) -> None:
    fields, param, problem = WRONG[name]
    error = client.refused(RESPONSES, **fields)
    assert problem in error["message"] and "\n" not in error["message"]
    assert (error["param"] or "") == param


@pytest.mark.parametrize("number", ["1e400", "NaN"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            '"text": {"format": {"type": "json_schema", "schema": {}, "name": NUMBER}}',
            "text.format",
        ),
        ('"tools": [{"type": "function", "name": "f", "strict": NUMBER}]', "tools"),
    ],
)
def test_what_a_response_repeats_is_json(
    client: Client, fields: str, param: str, number: str
) -> None:
    body = '{"input": "a", ' + fields.replace("NUMBER", number) + "}"
    headers = {"content-type": "application/json"}
    answer = client.http.post(RESPONSES, content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "not finite" in error["message"]


@pytest.fixture(scope="module")
def client() -> Any:
    with scripted_llm() as llm, served(llm) as client:
        yield client


def test_truncation_drops_the_oldest_turns() -> None:
    turns = [
        {"role": role, "content": f"{number} " + "x" * 300}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "rules"}, *turns, {"role": "user", "content": "last"}]
    fields: dict[str, Any] = {"input": items, "max_output_tokens": 100, **GREEDY}
    with scripted_llm() as llm, served(llm) as client:
        length = llm.max_length
        assert "maximum context length" in client.refused(RESPONSES, **fields)["message"]
        assert (
            "maximum context length"
            in client.refused(RESPONSES, **fields, truncation="disabled")["message"]
        )
        response = client.ask(RESPONSES, **fields, truncation="auto")
        per_turn = len(f"user: 10 {'x' * 300}\nassistant: 10 {'x' * 300}\n")
        prompt = response["usage"]["input_tokens"]
        assert length - 100 - per_turn < prompt <= length - 100
        first = next(
            n
            for n in range(20)
            if length - 100
            >= len(
                "".join(
                    f"{t['role']}: {t['content']}\n" for t in [items[0], *turns[2 * n :], items[-1]]
                )
                + "assistant: "
            )
        )
        rest = [items[0], *turns[2 * first :], items[-1]]
        shorter = client.ask(RESPONSES, **{**fields, "input": rest})
        assert plain(shorter) == plain(response)
        short = client.ask(RESPONSES, "abc", **GREEDY, truncation="auto")
        assert plain(short) == plain(client.ask(RESPONSES, "abc", **GREEDY))
        alone = {"input": "a" * 5000, "truncation": "auto"}
        assert "maximum context length" in client.refused(RESPONSES, **alone)["message"]
