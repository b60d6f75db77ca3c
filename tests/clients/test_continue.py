"""Continue: its library for OpenAI's API, run with Node.js, and the requests that the editor
extension sends itself (autocompletion, the providers `vllm` and `ollama`), as it sends them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

MODEL = "smollm2-135m-instruct"
#: Where `make test-clients` installs the library.
LIBRARY = Path(sys.prefix) / "node_modules/@continuedev/openai-adapters"
ASK = [{"role": "user", "content": "Name a city."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file",
        "parameters": {
            "type": "object",
            "properties": {"filepath": {"type": "string", "enum": ["a.py", "b.py"]}},
            "required": ["filepath"],
        },
    },
}
#: Calls the functions of the library, and prints one JSON object with what they return.
PROGRAM = """
import { constructLlmApi } from "@continuedev/openai-adapters";
const [apiBase, model, ask, tool] = process.argv.slice(1).map((text) => JSON.parse(text));
const api = constructLlmApi({ provider: "vllm", apiKey: "none", apiBase });
const { signal } = new AbortController();
const chat = { model, messages: ask, temperature: 0 };
const forced = { type: "function", function: { name: tool.function.name } };
const all = async (stream) => { const parts = []; for await (const part of stream) parts.push(part); return parts; };
const failure = async (promise) => { try { await promise; } catch (error) { return [error.status, error.message]; } };
console.log(JSON.stringify({
  models: await api.list(),
  chat: await api.chatCompletionNonStream({ ...chat, max_tokens: 12, stream: false }, signal),
  chunks: await all(api.chatCompletionStream({ ...chat, max_tokens: 12, stream: true }, signal)),
  call: await api.chatCompletionNonStream({ ...chat, max_tokens: 60, stream: false, tools: [tool],
    tool_choice: forced, parallel_tool_calls: false }, signal),
  callChunks: await all(api.chatCompletionStream({ ...chat, max_tokens: 60, stream: true, tools: [tool],
    tool_choice: forced }, signal)),
  completion: await all(api.completionStream({ model, prompt: "def f(x):", max_tokens: 12, temperature: 0,
    stream: true, stop: ["/src/", "```"] }, signal)),
  embeddings: await api.embed({ model, input: ["a cat", "the sea"] }),
  failure: await failure(api.chatCompletionNonStream({ ...chat, model: "another", stream: false }, signal)),
}));
"""  # noqa: E501
#: Prints the chunks of a gap that is filled.
FILL_IN = """
import { constructLlmApi } from "@continuedev/openai-adapters";
const [apiBase, body] = process.argv.slice(1).map((text) => JSON.parse(text));
const api = constructLlmApi({ provider: "vllm", apiKey: "none", apiBase });
const parts = [];
for await (const part of api.fimStream(body, new AbortController().signal)) parts.push(part);
console.log(JSON.stringify(parts));
"""


def run_library(program: str, *arguments: Any) -> Any:
    """The JSON that a program prints as its last line."""
    node = shutil.which("node")
    if node is None or not LIBRARY.is_dir():
        pytest.skip("needs Node.js and npm when the environment of the clients is made")
    done = subprocess.run(
        [node, "--input-type=module", "-e", program, "--", *map(json.dumps, arguments)],
        cwd=sys.prefix,  # where the packages are found
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(url: str) -> dict[str, Any]:
    """What each function of the library returns."""
    found: dict[str, Any] = run_library(PROGRAM, f"{url}/", MODEL, ASK, TOOL)
    return found


def test_the_library_reads_texts_of_the_engine(results: dict[str, Any], llm: LLM) -> None:
    (model,) = results["models"]
    assert (model["id"], model["max_model_len"]) == (MODEL, llm.max_length)
    alone = llm.chat(ASK, max_tokens=12)
    assert results["chat"]["choices"][0]["message"]["content"] == alone.text
    *chunks, last = results["chunks"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == (
        alone.text
    )
    assert last["usage"]["completion_tokens"] == len(alone.tokens)
    texts = [chunk["choices"][0]["text"] for chunk in results["completion"]]
    stopped = llm.generate("def f(x):", max_tokens=12, stop=["/src/", "```"])
    assert "".join(texts) == stopped.text
    for entry, text in zip(results["embeddings"]["data"], ("a cat", "the sea"), strict=True):
        assert entry["embedding"] == pytest.approx(llm.embed(text), abs=1e-4)


def test_the_library_reads_calls(results: dict[str, Any]) -> None:
    (call,) = results["call"]["choices"][0]["message"]["tool_calls"]
    deltas = [chunk["choices"][0]["delta"] for chunk in results["callChunks"] if chunk["choices"]]
    functions = [
        part["function"] for delta in deltas for part in delta.get("tool_calls") or () if part
    ]
    assert functions[0]["name"] == call["function"]["name"] == "read_file"
    streamed = "".join(function.get("arguments") or "" for function in functions)
    assert streamed == call["function"]["arguments"]
    assert json.loads(streamed)["filepath"] in ("a.py", "b.py")


def test_the_library_throws_the_servers_errors(results: dict[str, Any]) -> None:
    status, message = results["failure"]
    assert status == 404 and "does not exist on this server" in message


def test_the_library_fills_a_gap() -> None:
    fields = {"prompt": "def f(x):", "suffix": "return x", "max_tokens": 8, "temperature": 0}
    with scripted_llm(fills_in=True) as llm:
        with LiveServer(llm, Settings(name="scripted", port=0)) as server:
            body = {"model": "scripted", "stop": ["/src/", "```"], "stream": True, **fields}
            chunks = run_library(FILL_IN, f"{server.url}/v1/", body)
            answer = httpx.post(f"{server.url}/v1/completions", json=fields, trust_env=False)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == answer.json()["choices"][0]["text"] != ""


@pytest.fixture(scope="module")
def http(root: str) -> Iterator[httpx.Client]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    with httpx.Client(base_url=root, headers=headers, timeout=60, trust_env=False) as http:
        yield http


def test_a_code_completion_is_streamed_up_to_a_stop(http: httpx.Client, llm: LLM) -> None:
    prompt = "<fim_prefix>def double(x):\n    return <fim_suffix>\n<fim_middle>"
    stops = ["<fim_prefix>", "<file_sep>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```"]
    body = {
        "model": MODEL, "max_tokens": 16, "temperature": 0.01, "stream": True, "stop": stops,
        "prompt": prompt, "seed": 1,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body, headers={"api-key": "none"})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    # A line that begins with ": ping" would end the stream for Continue.
    chunks = [json.loads(line.removeprefix("data:")) for line in lines]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    alone = llm.generate(prompt, max_tokens=16, temperature=0.01, stop=stops, seed=1)
    assert text == alone.text


def test_the_provider_ollama(http: httpx.Client, llm: LLM) -> None:
    shown = http.post("/api/show", json={"name": MODEL}).json()
    assert isinstance(shown.get("parameters", ""), str) and isinstance(shown["template"], str)
    (listed,) = http.get("/api/tags").json()["models"]
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 8192, "stop": ["```"]}
    common = {"model": listed["name"], "options": options, "keep_alive": 1800, "stream": True}

    def lines(path: str, **fields: Any) -> list[dict[str, Any]]:
        answer = http.post(path, json={**common, **fields})
        assert answer.status_code == 200, answer.text
        found = [json.loads(line) for line in answer.text.split("\n") if line.strip()]
        assert not any("error" in line for line in found)
        return found

    parts = lines("/api/generate", prompt="def f(x):", raw=True)
    assert "".join(part["response"] for part in parts) == (
        llm.generate("def f(x):", max_tokens=12, stop=["```"]).text
    )
    parts = lines("/api/chat", messages=ASK)
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert "".join(part["message"]["content"] for part in parts) == (
        llm.chat(ASK, max_tokens=12, stop=["```"]).text
    )
    calls = [{"function": {"name": "read_file", "arguments": {"filepath": "a.py"}}}]
    turns = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "a = 1"},
    ]
    assert lines("/api/chat", messages=turns, tools=[TOOL])[-1]["done"]
    vectors = http.post("/api/embed", json={"model": MODEL, "input": ["a cat"]}).json()
    assert vectors["embeddings"][0] == pytest.approx(llm.embed("a cat"), abs=1e-4)
