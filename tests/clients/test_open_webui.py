"""Open WebUI's requests, as its routers `openai` and `ollama` and its retrieval send them, and the
parts of the answers that it reads. `test_open_webui_program` runs the program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from anydecode import LLM
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
from server_models import THINKING, TOWN, TemplateTokenizer, answering

MODEL = "smollm2-135m-instruct"
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer none",
    # With ENABLE_FORWARD_USER_INFO_HEADERS.
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "7f9c",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "51f1",
}
ASK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a city."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
#: As the prompt of the task that names a chat.
TITLE = """### Task:
Generate a concise, 3-5 word title with an emoji summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Name a city.
</chat_history>"""


@pytest.fixture(scope="module")
def http(root: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=root, headers=HEADERS, timeout=60, trust_env=False) as http:
        yield http


def sent(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The answer to a body, which Open WebUI sends as text."""
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which ends with [DONE]."""
    answer = http.post(path, content=json.dumps(body))
    # Open WebUI streams what has this type, and reads anything else as JSON.
    assert "text/event-stream" in answer.headers["content-type"], answer.text
    *lines, last = [line for line in answer.text.splitlines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream of Ollama's API."""
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_models_are_listed(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert model.get("name", "") is not None


def test_a_chat_is_streamed_with_its_usage(http: httpx.Client, llm: LLM) -> None:
    # What is left of a chat's fields after metadata, features, chat_id, session_id and others are
    # taken out, with parameters of the chat.
    body = {
        "stream": True,
        "model": MODEL,
        "messages": ASK,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 3,
        "stop": ["</end>"],
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "reasoning_effort": "low",
        "logit_bias": {"5": -100},
        "max_tokens": 12,
    }
    found = events(http, "/v1/chat/completions", body)
    alone = llm.chat(ASK, max_tokens=12, logit_bias={5: -100})
    texts = [
        choice["delta"].get("content") or "" for event in found for choice in event["choices"][:1]
    ]
    assert "".join(texts) == alone.text
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == [alone.finish_reason]
    (usage,) = [event["usage"] for event in found if event.get("usage")]
    assert usage["completion_tokens"] == len(alone.tokens)
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_the_title_of_a_chat_is_answered_in_one_piece(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "user", "content": TITLE}]
    body = {"model": MODEL, "messages": messages, "stream": False}
    # Parameters of the model for tasks; Open WebUI itself sets none.
    found = sent(http, "/v1/chat/completions", {**body, "max_tokens": 24, "temperature": 0})
    assert found["choices"][0]["message"]["content"] == llm.chat(messages, max_tokens=24).text


def test_calls_and_their_results_are_read_again(http: httpx.Client) -> None:
    calls = [
        {"index": 0, "id": "call_1", "type": "function",
         "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}},
        {"index": 1, "id": "fc_2", "type": "function",
         "function": {"name": "weather", "arguments": ""}},
    ]  # fmt: skip
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "I ask."},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "fc_2", "content": "Error: no town"},
    ]
    body = {"model": MODEL, "messages": messages, "tools": [TOOL], "stream": True, "max_tokens": 8}
    assert events(http, "/v1/chat/completions", body)


def test_streamed_calls_are_told_apart_by_their_index() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "%s"}}\n</tool_call>'
    text = f"{call % 'Oslo'}\n{call % 'Rome'}"
    with answering(text.encode(), TemplateTokenizer(THINKING)) as llm:
        settings = Settings(name="scripted", port=0, reasoning_parser="none")
        with LiveServer(llm, settings) as server, httpx.Client(base_url=server.url) as http:
            http.headers.update(HEADERS)
            body = {
                "model": "scripted", "messages": [{"role": "user", "content": "abc"}],
                "tools": [TOOL], "stream": True,
            }  # fmt: skip
            found: dict[int, list[str]] = {}
            options = {"max_tokens": 300, "temperature": 0}
            for event in events(http, "/v1/chat/completions", {**body, **options}):
                for delta in event["choices"][0]["delta"].get("tool_calls") or ():
                    function = delta["function"]
                    names = found.setdefault(delta["index"], [function.get("name", ""), ""])
                    names[1] += function.get("arguments") or ""
            arguments = [{"town": "Oslo"}, {"town": "Rome"}]
            assert [json.loads(found[index][1]) for index in (0, 1)] == arguments
            assert [found[index][0] for index in (0, 1)] == ["weather"] * 2

            body["options"] = {"num_predict": 300, "temperature": 0}
            parts = lines(http, "/api/chat", body)
            calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
            functions = [call["function"] for call in calls]
            indexes = [call.get("index", call["function"].get("index", 0)) for call in calls]
            assert indexes == [0, 1] and [each["arguments"] for each in functions] == arguments


def test_reasoning_is_a_field_of_its_own() -> None:
    with answering(b"hm</think>yes", TemplateTokenizer(THINKING)) as llm:
        with LiveServer(llm, Settings(name="scripted", port=0)) as server:
            with httpx.Client(base_url=server.url, headers=HEADERS) as http:
                body = {
                    "model": "scripted", "messages": [{"role": "user", "content": "abc"}],
                    "stream": True, "temperature": 0, "max_tokens": 40,
                }  # fmt: skip
                deltas = [
                    event["choices"][0]["delta"]
                    for event in events(http, "/v1/chat/completions", body)
                ]
                thoughts = [
                    delta.get("reasoning_content") or delta.get("reasoning") or ""
                    for delta in deltas
                ]
                assert "".join(thoughts) == "hm"
                assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


def test_an_error_is_an_object_with_a_message(http: httpx.Client) -> None:
    body = {"model": "another", "messages": ASK, "stream": True}
    answer = http.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 404 and "application/json" in answer.headers["content-type"]
    assert "does not exist" in answer.json()["error"]["message"]
    answer = http.post("/api/chat", content=json.dumps(body))
    assert answer.status_code == 404 and "does not exist" in answer.json()["error"]


def test_documents_are_embedded(http: httpx.Client, llm: LLM) -> None:
    texts = ["a cat", "the sea"]
    found = sent(http, "/v1/embeddings", {"input": texts, "model": MODEL})
    vectors = [entry["embedding"] for entry in found["data"]]
    for vector, text in zip(vectors, texts, strict=True):
        assert vector == pytest.approx(llm.embed(text), abs=1e-4)
    found = sent(http, "/api/embed", {"input": texts, "model": MODEL, "truncate": True})
    for one, other in zip(found["embeddings"], vectors, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_connection_to_ollama_is_checked_and_lists_models(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split("."))) > (0,)
    (model,) = http.get("/api/tags").json()["models"]
    assert model["model"] == model["name"] == f"{MODEL}:latest" and model["details"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert loaded["model"] == model["model"]
    assert datetime.fromisoformat(loaded["expires_at"]).timestamp() > 0
    shown = sent(http, "/api/show", {"model": model["model"]})
    assert "completion" in shown["capabilities"] and shown["model_info"]
    unloaded = sent(http, "/api/generate", {"model": model["model"], "keep_alive": 0, "prompt": ""})
    assert unloaded["done"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_through_ollamas_api(http: httpx.Client, llm: LLM, stream: bool) -> None:
    body = {
        "model": f"{MODEL}:latest",
        "messages": ASK,
        "stream": stream,
        "keep_alive": "5m",
        "options": {
            "num_predict": 12, "temperature": 0.0, "seed": 3, "num_ctx": 4096, "num_keep": 4,
            "repeat_last_n": 64, "num_batch": 512, "num_gpu": 1, "use_mmap": True,
            "num_thread": 2, "stop": ["</end>"],
        },
    }  # fmt: skip
    parts = lines(http, "/api/chat", body) if stream else [sent(http, "/api/chat", body)]
    alone = llm.chat(ASK, max_tokens=12)
    assert "".join(part["message"].get("content", "") for part in parts) == alone.text
    end = parts[-1]
    assert end["done"] and end["done_reason"] == alone.finish_reason
    assert end["eval_count"] == len(alone.tokens) and end["prompt_eval_count"] > 0
    assert min(end["eval_duration"], end["prompt_eval_duration"], end["total_duration"]) >= 0


def test_a_schema_through_ollamas_api(http: httpx.Client) -> None:
    options = {"num_predict": 40}
    messages = [{**message, "thinking": "hm"} for message in ASK]
    body = {"model": MODEL, "messages": messages, "format": TOWN, "options": options}
    found = sent(http, "/api/chat", {**body, "stream": False})
    assert json.loads(found["message"]["content"])["town"] in ("Oslo", "Rome")
