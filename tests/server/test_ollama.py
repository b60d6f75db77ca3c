"""Ollama's API: requests are translated, and answers are those of the engine."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.metrics import Metrics  # noqa: E402
from anydecode.server.ollama.models import short  # noqa: E402
from anydecode.server.ollama.prompts import chat_form  # noqa: E402
from anydecode.server.ollama.protocol import OllamaChatRequest  # noqa: E402
from anydecode.server.prompts import conversation  # noqa: E402
from anydecode.server.service import Service  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from gguf_models import make_tensors, write_gguf  # noqa: E402
from server_client import Client, served  # noqa: E402
from server_models import THINKING, TOWN, TemplateTokenizer, answering  # noqa: E402

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
PROMPT = ASK[0]["content"]
RENDERED = f"user: {PROMPT}\nassistant: "
TOOL = {"type": "function", "function": {"name": "weather", "parameters": TOWN}}
GREEDY = {"temperature": 0, "num_predict": 8}
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


def body(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": PROMPT}
    return {"model": "scripted", "options": GREEDY, **base, **fields}


def post(client: Client, path: str, **fields: Any) -> dict[str, Any]:
    """The answer, not streamed."""
    answer = client.http.post(path, json={**body(path, **fields), "stream": False})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(client: Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of the answer, which is streamed unless a request says otherwise."""
    answer = client.http.post(path, json=body(path, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def refused(client: Client, path: str, status: int = 400, **fields: Any) -> str:
    answer = client.http.post(path, json=body(path, **fields))
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    message: str = answer.json()["error"]
    assert "\n" not in message
    return message


def text_of(line: dict[str, Any]) -> str:
    text: str = line["response"] if "response" in line else line["message"]["content"]
    return text


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 3}])
def test_an_answer_is_the_text_of_the_engine(
    client: Client, llm: LLM, path: str, options: dict[str, Any]
) -> None:
    alone = llm.generate(RENDERED, max_tokens=24, **{**DEFAULTS, **options})
    sent = {**options, "num_predict": 24}
    lines = stream(client, path, options=sent)
    assert "".join(map(text_of, lines)) == alone.text and text_of(lines[-1]) == ""
    answer = post(client, path, options=sent)
    assert text_of(answer) == alone.text
    for last in (lines[-1], answer):
        assert last["model"] == "scripted" and last["created_at"].endswith("Z")
        assert last["done_reason"] == alone.finish_reason
        assert last["prompt_eval_count"] == len(RENDERED)
        assert last["eval_count"] == len(alone.tokens)
        times = [last["prompt_eval_duration"], last["eval_duration"]]
        assert all(type(one) is int and one >= 0 for one in times)
        assert 0 < sum(times) <= last["total_duration"] and last["load_duration"] == 0


def test_a_raw_prompt_has_no_template(client: Client, llm: LLM) -> None:
    text = llm.generate(PROMPT, max_tokens=8).text
    assert text_of(post(client, GENERATE, raw=True)) == text
    assert "".join(map(text_of, stream(client, GENERATE, raw=True))) == text
    value = post(client, GENERATE, raw=True, format={"enum": ["x", "y"]})["response"]
    assert json.loads(value) in ("x", "y")
    system = llm.generate(f"system: be brief\n{RENDERED}", max_tokens=8).text
    assert post(client, GENERATE, system="be brief")["response"] == system


def test_the_text_before_a_suffix_is_that_of_the_other_api() -> None:
    with scripted_llm(fills_in=True) as llm, served(llm) as client:
        fields = {"prompt": "def f(x):", "suffix": "return x"}
        expected = client.ask("/v1/completions", **fields, max_tokens=8, temperature=0)
        text = expected["choices"][0]["text"]
        assert text_of(post(client, GENERATE, **fields)) == text
        assert "".join(map(text_of, stream(client, GENERATE, **fields))) == text
        assert "system is not supported here" in refused(client, GENERATE, system="b", **fields)
        shown = client.http.post("/api/show", json={"model": "scripted"}).json()
        assert shown["capabilities"] == ["completion", "tools", "insert"]


def test_options_are_mapped(client: Client, llm: LLM) -> None:
    text = llm.generate(RENDERED, max_tokens=30).text
    for sent, expected in (
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5},
         {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        ({"stop": [text[6:8]]}, {"stop": [text[6:8]]}),
        ({"temperature": 0.7, "min_p": 0.2, "seed": 3, "top_p": 0.8},
         {"temperature": 0.7, "min_p": 0.2, "seed": 3, "top_p": 0.8, "top_k": 40}),
        ({"temperature": 0.7, "mirostat": 2, "mirostat_tau": 3.0, "seed": 3},
         {"temperature": 0.7, "mirostat": 2, "mirostat_tau": 3.0, "seed": 3}),
    ):  # fmt: skip
        alone = llm.generate(RENDERED, max_tokens=30, **expected).text
        found = post(client, GENERATE, options={"temperature": 0, "num_predict": 30, **sent})
        assert found["response"] == alone
    seeds = {post(client, CHAT, options={"seed": -1, "num_predict": 1})["anydecode"]["seed"]
             for _ in range(2)}  # fmt: skip
    assert len(seeds) == 2
    found = post(client, CHAT, options={"temperature": 0, "num_predict": 9, "decoder": "beam"})
    assert found["anydecode"]["decoder"] == "beam"


@pytest.mark.parametrize("limit", [-1, -2, 0])
def test_an_answer_without_a_limit_fills_the_context(limit: int) -> None:
    with answering(b"yes" * 30) as llm, served(llm) as client:
        ask = [{"role": "user", "content": "abc"}]
        answer = post(client, CHAT, messages=ask, options={"temperature": 0, "num_predict": limit})
    assert text_of(answer) == "yes" * 30 and answer["done_reason"] == "stop"


def test_fields_without_effect_are_listed(client: Client) -> None:
    found = post(
        client, CHAT, options={**GREEDY, "num_ctx": 8, "n": 3, "wings": 2, "low_vram": None},
        keep_alive="5m", shift=True,
    )  # fmt: skip
    names = ["keep_alive", "options.n", "options.num_ctx", "options.wings", "shift"]
    assert found["anydecode"]["ignored"] == names
    assert "ignored" not in post(client, CHAT)["anydecode"]
    assert post(client, CHAT, think=False)["anydecode"]["ignored"] == ["think"]
    assert post(client, CHAT, think="low")["anydecode"]["ignored"] == ["think"]
    tool = {"type": "function", "items": {}, "function": {"name": "f", "wings": 2}}
    found = post(client, CHAT, tools=[tool], options={"num_predict": 4})
    assert found["anydecode"]["ignored"] == ["tools.function.wings", "tools.items"]
    call = {"id": "1", "wing": 2, "function": {"name": "f", "arguments": {}, "wings": 2}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call], "name": None, "x": 0}, *ASK]
    found = post(client, CHAT, messages=messages, options={"num_predict": 4})
    assert found["anydecode"]["ignored"] == [
        "messages.tool_calls.function.wings", "messages.tool_calls.wing", "messages.x"
    ]  # fmt: skip


def test_formats_are_enforced(client: Client) -> None:
    options = {"num_predict": 80, "seed": 1}
    for path in (CHAT, GENERATE):
        found = post(client, path, format=TOWN, options=options)
        assert json.loads(text_of(found))["town"] in ("Oslo", "Rome")
        found = post(client, path, format="json", options=options)
        assert isinstance(json.loads(text_of(found)), dict)
        assert text_of(post(client, path, format="")) == text_of(post(client, path))


def test_calls_have_arguments_as_objects() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
    ask = [{"role": "user", "content": "abc"}]
    with answering(f"I ask.{call}\n{call}".encode(), TemplateTokenizer(THINKING)) as llm:
        with served(llm, reasoning_parser="none") as client:
            options = {"temperature": 0, "num_predict": 300}
            fields: dict[str, Any] = {"messages": ask, "tools": [TOOL], "options": options}
            answer = post(client, CHAT, **fields)
            lines = stream(client, CHAT, **fields)
    streamed = [call for line in lines for call in line["message"].get("tool_calls", [])]
    for calls in (answer["message"]["tool_calls"], streamed):
        functions = [call["function"] for call in calls]
        # A client that reads a stream tells the calls apart by their index.
        assert functions == [
            {"index": index, "name": "weather", "arguments": {"town": "Oslo"}} for index in (0, 1)
        ]
        assert len({call["id"] for call in calls}) == 2
    assert answer["message"]["content"] == "".join(map(text_of, lines)) == "I ask."
    assert answer["done_reason"] == lines[-1]["done_reason"] == "stop"


def test_a_call_that_is_cut_has_what_is_complete() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "' + "c" * 99
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 90}},
        "required": ["a", "b"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with answering(text.encode(), TemplateTokenizer(THINKING)) as llm:
        with served(llm, reasoning_parser="none") as client:
            fields: dict[str, Any] = {
                "messages": [{"role": "user", "content": "abc"}], "tools": [tool],
                "options": {"temperature": 0, "num_predict": 60},
            }  # fmt: skip
            answer, lines = post(client, CHAT, **fields), stream(client, CHAT, **fields)
    for found in (answer, lines[-2]):
        (call,) = found["message"]["tool_calls"]
        assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": 1, "b": "c" * 6}}
    assert answer["done_reason"] == lines[-1]["done_reason"] == "length"


def test_reasoning_is_apart_from_the_answer() -> None:
    ask = [{"role": "user", "content": "abc"}]
    with answering(b"hm</think>yes", TemplateTokenizer(THINKING)) as llm, served(llm) as client:
        for path, fields in ((CHAT, {"messages": ask}), (GENERATE, {"prompt": "abc"})):
            options = {"temperature": 0, "num_predict": 40}
            answer = post(client, path, think=True, options=options, **fields)
            lines = stream(client, path, think=True, options=options, **fields)
            found = answer.get("message", answer)
            assert found["thinking"] == "hm" and text_of(answer) == "yes"
            parts = [line.get("message", line).get("thinking", "") for line in lines]
            assert "".join(parts) == "hm" and "".join(map(text_of, lines)) == "yes"
            assert "ignored" not in answer["anydecode"]
            prompt = post(client, path, think=False, options=options, **fields)
            assert prompt["prompt_eval_count"] == len("abc<think></think>")


def test_log_probabilities(client: Client, llm: LLM) -> None:
    alone = llm.generate(RENDERED, max_tokens=8, logprobs=2)
    assert alone.logprobs is not None
    for raw, prompt in ((False, PROMPT), (True, RENDERED)):
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "raw": raw}
        answer = post(client, GENERATE, prompt=prompt, **fields)
        lines = stream(client, GENERATE, prompt=prompt, **fields)
        streamed = [entry for line in lines for entry in line.get("logprobs", [])]
        for entries in (answer["logprobs"], streamed):
            assert [entry["logprob"] for entry in entries] == pytest.approx(
                [note.logprob for note in alone.logprobs]
            )
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_a_request_without_a_prompt_loads_the_model(client: Client) -> None:
    for path, empty in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""})):
        for keep_alive, reason in ((None, "load"), (0, "unload")):
            answer = client.http.post(path, json=body(path, keep_alive=keep_alive, **empty))
            assert answer.json()["done_reason"] == reason and answer.json()["done"]
            assert text_of(answer.json()) == ""


def test_models_have_a_tag(client: Client) -> None:
    for name in ("scripted", "scripted:latest"):
        assert post(client, CHAT, model=name)["model"] == name
        shown = client.http.post("/api/show", json={"name": name}).json()
        assert shown["model_info"]["scripted.context_length"] == 4096
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["details"]["family"] == "scripted"
    for path in (CHAT, GENERATE, "/api/show", "/api/embed"):
        fields = {"input": "a"} if path == "/api/embed" else {}
        for name in ("another", "scripted:8b"):
            assert f"the model '{name}' does not exist" in refused(
                client, path, 404, model=name, **fields
            )
    (listed,) = client.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "scripted:latest" and listed["digest"]
    (loaded,) = client.http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 4096 and loaded["digest"] == listed["digest"]
    assert client.http.get("/api/version").json()["version"].count(".") == 2
    assert client.http.head("/").status_code == 200  # by which Ollama's command finds a server


def test_a_model_of_a_file_is_described(tmp_path: Path) -> None:
    path, tensors = tmp_path / "tiny.gguf", make_tensors("llama")
    write_gguf(path, "llama", tensors, "Q8_0")
    with LLM(path, threads=1) as llm, served(llm) as client:
        (listed,) = client.http.get("/api/tags").json()["models"]
        shown = client.http.post("/api/show", json={"model": "scripted"}).json()
    count = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 2)
    assert listed["size"] == path.stat().st_size
    written = datetime.fromisoformat(listed["modified_at"].replace("Z", "+00:00"))
    assert written.timestamp() == pytest.approx(path.stat().st_mtime, abs=1e-3)
    assert listed["details"] == shown["details"] == {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": "0M", "quantization_level": "Q8_0",
    }  # fmt: skip
    assert shown["template"] == ""
    assert shown["model_info"] == {
        "general.architecture": "llama", "general.parameter_count": count,
        "llama.context_length": 256, "llama.embedding_length": 64, "llama.block_count": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"), [(134_479_872, "134M"), (999_600_000, "1000M"), (1_540_000_000, "1.5B")]
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert short(count) == text


def test_embeddings_are_those_of_the_other_api(client: Client) -> None:
    entries = client.http.post("/v1/embeddings", json={"input": ["ab", "c"]}).json()["data"]
    expected = [entry["embedding"] for entry in entries]

    def embed(path: str, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = client.http.post(path, json=fields).json()
        return found

    found = embed("/api/embed", input=["ab", "c"], truncate=True, user="x")
    assert found["embeddings"] == expected and found["prompt_eval_count"] == 3
    assert found["anydecode"] == {"ignored": ["user"]}
    assert embed("/api/embed", input="ab")["embeddings"] == expected[:1]
    assert embed("/api/embed", input=[])["embeddings"] == []
    assert embed("/api/embeddings", prompt="ab") == {"embedding": expected[0]}
    assert embed("/api/embeddings", prompt="") == {"embedding": []}
    assert "dimensions is 3" in embed("/api/embed", input="ab", dimensions=3)["error"]


def test_messages_are_translated(llm: LLM) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    ask = OllamaChatRequest.model_validate(
        {
            "messages": [
                {"role": "assistant", "content": "b", "thinking": "c", "tool_calls": [call]},
                {"role": "tool", "content": "d", "tool_name": "f"},
            ]
        }
    )
    request, _ = chat_form(ask, Service(llm, Settings(), Metrics(lambda: {})))
    assert conversation(request.messages) == [
        {"role": "assistant", "content": "b", "reasoning_content": "c",
         "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "d", "name": "f"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "path, fields, reason",
    [
        (GENERATE, {"suffix": "b"}, "suffix needs a fill-in-the-middle model"),
        (GENERATE, {"template": "b"}, "template is not supported here"),
        (GENERATE, {"context": [1]}, "context is not supported here"),
        (GENERATE, {"images": ["b"]}, "images is not supported here"),
        (GENERATE, {"raw": True, "system": "b"}, "system is not supported here: with raw"),
        (GENERATE, {"format": "xml"}, "format"),
        (GENERATE, {"prompt": 5}, "prompt must be a string, not 5"),
        (GENERATE, {"options": {"temperature": "hot"}}, "options.temperature must be a number"),
        (GENERATE, {"options": {"num_predict": -3}}, "options.num_predict must be -2 or more"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "images are"),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "a",
                        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                    }
                ]
            },
            "it has tool calls",
        ),
        (CHAT, {"messages": [{"role": "cat"}]}, "messages.0.role must be 'system'"),
        (CHAT, {"tools": [{"function": {}}]}, "tools.0.function.name is required"),
        (CHAT, {"stream": "no"}, "stream must be true or false"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(
    client: Client, path: str, fields: dict[str, Any], reason: str
) -> None:
    assert reason in refused(client, path, **fields)


def test_other_endpoints_are_refused(client: Client) -> None:
    for action in ("pull", "push", "create", "copy"):
        assert f"/api/{action} is not supported" in refused(client, f"/api/{action}", 501)
    answer = client.http.request("DELETE", "/api/delete", json={"model": "scripted"})
    assert answer.status_code == 501 and "not supported" in answer.json()["error"]
    answer = client.http.get("/api/nothing")
    assert answer.status_code == 404 and isinstance(answer.json()["error"], str)


def test_limits_and_keys_apply(llm: LLM) -> None:
    with served(llm, api_keys=("one",), max_requests=0, max_body=200) as client:
        for method, path in (("POST", CHAT), ("GET", "/api/tags"), ("DELETE", "/api/delete")):
            answer = client.http.request(method, path, json={})
            assert answer.status_code == 401
            assert "requires an API key" in answer.json()["error"]
        client.http.headers["authorization"] = "Bearer one"
        assert client.http.get("/api/tags").status_code == 200
        answer = client.http.post(CHAT, json={})
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert "already running" in answer.json()["error"]
        answer = client.http.post(CHAT, content=b" " * 300)
        assert answer.status_code == 413 and "larger than 200" in answer.json()["error"]
