"""promptfoo's requests, as its providers `openai:chat`, `openai:completion`, `openai:responses` and
`openai:embedding` send them, and the parts of the answers that it reads. The program itself is not
run: it needs a newer Node.js than many machines have, and 280 MB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from anydecode import LLM
from server_models import TOWN

MODEL = "smollm2-135m-instruct"
#: Node's own headers, and promptfoo's.
HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer none",
    "x-promptfoo-version": "0.123.1",
    "accept": "*/*",
    "accept-language": "*",
    "sec-fetch-mode": "cors",
    "user-agent": "node",
    "accept-encoding": "gzip, deflate",
}
ASK = [{"role": "user", "content": "Name a city. Hello"}]


@pytest.fixture(scope="module")
def http(root: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=root, headers=HEADERS, timeout=60, trust_env=False) as http:
        yield http


def sent(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, content=json.dumps(body, separators=(",", ":")))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat(http: httpx.Client, llm: LLM) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0}
    found = sent(http, "/v1/chat/completions", body)
    alone = llm.chat(ASK, max_tokens=16)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == alone.text
    assert choice["finish_reason"] == alone.finish_reason
    # A refusal or reasoning would be read instead of the content.
    assert not choice["message"].get("refusal") and not choice["message"].get("reasoning")
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_calls_are_read_from_the_message(http: httpx.Client) -> None:
    function = {"name": "weather", "description": "d", "parameters": TOWN}
    body = {
        "model": MODEL, "messages": ASK, "seed": 3, "max_tokens": 64, "temperature": 0.5,
        "top_p": 0.9, "tools": [{"type": "function", "function": function}],
        "tool_choice": "required", "stop": ["\n\n"],
    }  # fmt: skip
    (choice,) = sent(http, "/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"] is None  # else the text is the output, not the calls
    call = choice["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["town"] in ("Oslo", "Rome")


def test_a_schema(http: httpx.Client) -> None:
    schema = {"name": "n", "strict": True, "schema": TOWN}
    body = {
        "model": MODEL, "messages": ASK, "max_tokens": 64, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }  # fmt: skip
    (choice,) = sent(http, "/v1/chat/completions", body)["choices"]
    assert json.loads(choice["message"]["content"])["town"] in ("Oslo", "Rome")


def test_a_completion(http: httpx.Client, llm: LLM) -> None:
    body = {
        "model": MODEL, "prompt": "Name a city.", "max_tokens": 8, "temperature": 0, "top_p": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "best_of": 1,
        "stop": ["<|im_end|>", "<|endoftext|>"],
    }  # fmt: skip
    found = sent(http, "/v1/completions", body)
    assert found["choices"][0]["text"] == llm.generate("Name a city.", max_tokens=8).text


def test_a_response(http: httpx.Client, llm: LLM) -> None:
    body = {
        "model": MODEL, "input": ASK[0]["content"], "max_output_tokens": 8, "temperature": 0,
        "text": {"format": {"type": "text"}},
    }  # fmt: skip
    found = sent(http, "/v1/responses", body)
    (item,) = found["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    assert part["text"] == llm.chat(ASK, max_tokens=8).text
    assert found["usage"]["input_tokens"] > 0 and found["usage"]["output_tokens"] == 8


def test_an_embedding_for_the_assertion_similar(http: httpx.Client, llm: LLM) -> None:
    found = sent(http, "/v1/embeddings", {"input": "Rome", "model": MODEL})
    assert found["data"][0]["embedding"] == pytest.approx(llm.embed("Rome"), abs=1e-4)


@pytest.mark.parametrize(
    "fields, status, text",
    [({"model": "another"}, 404, "does not exist"), ({"temperature": -1}, 400, "temperature")],
)
def test_errors_have_a_message(
    http: httpx.Client, fields: dict[str, Any], status: int, text: str
) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 1024, "temperature": 0, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status and text in answer.json()["error"]["message"]
