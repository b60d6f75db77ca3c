"""The server under realistic use: API keys, limits, invalid bodies, disconnects, shutdowns."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode import catalogue  # noqa: E402
from anydecode.api.request import Request  # noqa: E402
from anydecode.benchmarks.serving.bench import parse_objective  # noqa: E402
from anydecode.benchmarks.serving.replay import (  # noqa: E402
    Objective,
    RequestOutcome,
    gaps_during_prefill,
    summary,
)
from anydecode.benchmarks.serving.traces import (  # noqa: E402
    Arrival,
    prompt_text,
    read_trace,
    scaled,
)
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.cli.bench import run_bench  # noqa: E402
from anydecode.decoders.decoder import Decoder  # noqa: E402
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError  # noqa: E402
from anydecode.models.scripted import ScriptedModel  # noqa: E402
from anydecode.server import logs  # noqa: E402
from anydecode.server.app import create_app  # noqa: E402
from anydecode.server.parsers import TOOL_FORMATS, Parser  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

LONG = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("timed out")


def assert_clean(llm: Any) -> None:
    """Nothing runs or waits, and every used position belongs to a cached prefix."""
    wait_until(lambda: not llm.engine.has_work)
    llm.engine.check_integrity()
    for runner in llm.engine.runners.values():
        assert runner.pool.num_used == runner.prefixes.num_slots
    llm.clear()
    assert all(runner.pool.num_used == 0 for runner in llm.engine.runners.values())


@pytest.fixture
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture
def slow() -> Iterator[Any]:
    """An engine whose forward passes take 20 ms, so that requests are still running when a test
    acts."""
    with scripted_llm() as llm:
        runner = llm.engine.runners["target"]
        run = runner.run

        def slow_run(plan: Any) -> Any:
            time.sleep(0.02)
            return run(plan)

        runner.run = slow_run
        yield llm


def settings(**options: Any) -> Settings:
    return Settings(name="scripted", port=0, **options)


def client(server: LiveServer, **options: Any) -> Any:
    return httpx.Client(base_url=server.url, timeout=30, trust_env=False, **options)


def test_each_limit_returns_its_status_code(slow: Any) -> None:
    limits = settings(max_body=2000, max_prompt=50, max_requests=1, max_choices=4)
    with LiveServer(slow, limits) as server, client(server) as http:
        large = http.post("/v1/completions", json={"prompt": "a" * 3000})
        assert large.status_code == 413
        unannounced = http.post(
            "/v1/completions",
            content=(b"x" * 500 for _ in range(10)),
            headers={"content-type": "application/json"},
        )
        assert unannounced.status_code == 413
        long = http.post("/v1/completions", json={"prompt": "a" * 60})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        many = http.post("/v1/completions", json={"prompt": "a", "n": 5})
        assert many.status_code == 400
        body = {"prompt": "a", "stream": True, "max_tokens": 500, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # referenced, since its deletion would end the stream
            next(lines)
            busy = http.post("/v1/completions", json={"prompt": "b"})
            assert busy.status_code == 429
            assert 1 <= int(busy.headers["retry-after"]) <= 60
            assert http.get("/health").status_code == 200
        wait_until(lambda: http.post("/v1/completions", json={"prompt": "b"}).status_code == 200)
    assert_clean(slow)


def test_api_keys_are_required_and_isolate_caches(llm: Any) -> None:
    prompt = "a prompt that is long enough to be shared by those who may share it"
    with LiveServer(llm, settings(api_keys=("one", "two"))) as server, client(server) as http:

        def ask(key: str | None) -> Any:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            body = {"prompt": prompt, "max_tokens": 1}
            return http.post("/v1/completions", json=body, headers=headers)

        assert [ask(key).status_code for key in (None, "three", "on")] == [401, 401, 401]
        assert ask(None).json()["error"]["type"] == "authentication_error"
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").status_code == 200
        prefixes = llm.engine.runners["target"].prefixes
        assert ask("one").status_code == 200
        hits = prefixes.num_hits
        assert ask("two").status_code == 200
        assert prefixes.num_hits == hits
        assert ask("one").status_code == 200
        assert prefixes.num_hits > hits
    assert llm.decoder("suffix", "a") is llm.decoder("suffix", "a")
    assert llm.decoder("suffix", "a") is not llm.decoder("suffix", "b")


def test_invalid_bodies_return_400_with_a_one_line_message(llm: Any) -> None:
    ask = [{"role": "user", "content": "x"}]
    cases = {
        "/v1/completions": [
            {}, [], "x", {"prompt": {}}, {"prompt": []}, {"prompt": ""}, {"prompt": "\ud800"},
            {"prompt": "a", "temperature": -1}, {"prompt": "a", "n": 0},
            {"prompt": "a", "stop": ""},
            {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": "a", "logit_bias": {"99999": 1}},
            {"prompt": "a", "decoder": "nonsense"}, {"prompt": "a", "max_tokens": -5},
            {"prompt": "a", "decoder": "prompt-lookup:size=/etc/passwd"},
            {"prompt": "a", "decoder": "beam:width=99999"}, {"prompt": [[1], []]},
            {"prompt": "a", "decoder": "sarathi"}, {"prompt": [-1]},
            {"prompt": "a", "logprobs": 99},
        ],
        "/v1/chat/completions": [
            {"messages": []}, {"messages": [{"role": "king", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": ask, "top_logprobs": 3}, {"messages": ask, "tool_choice": "required"},
            {"messages": ask, "response_format": {"type": "json_schema"}},
        ],
        "/v1/embeddings": [{"input": ""}, {"input": []}, {"input": "a", "dimensions": 7}],
        "/v1/responses": [{"input": [{"type": "image"}]}, {"input": "a", "n": 2}],
    }  # fmt: skip
    with LiveServer(llm, settings()) as server, client(server) as http:
        headers = {"content-type": "application/json"}
        for path, bodies in cases.items():
            for body in bodies:
                answer = http.post(path, content=json.dumps(body), headers=headers)
                assert answer.status_code == 400, (body, answer.text)
                error = answer.json()["error"]
                assert error["message"] and "\n" not in error["message"]
        for content in (b"{", b"\xff\xfe", b"[" * 3000, b'{"prompt": NaN}'):
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400, answer.text
        assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"
        assert http.get("/v1/completions").status_code == 405
    assert_clean(llm)


class Broken(Decoder):
    """Generates three tokens, then raises an error."""

    def decode(self, sequence: Any) -> Any:
        for _ in range(3):
            scores = yield sequence.score(sequence.unscored())
            sequence.emit([scores.sampled[-1]])
        raise ZeroDivisionError("a fault in the decoder")


def test_a_decoder_fault_ends_only_its_request(slow: Any, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL)
    build = slow.methods.find
    slow.methods.find = lambda choice, *rest: Broken() if choice == "beam" else build(choice, *rest)
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    with LiveServer(slow, settings()) as server, client(server) as http:
        answers: list[Any] = []
        other = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=body))
        )
        other.start()
        broken = http.post("/v1/completions", json={**body, "decoder": "beam"})
        assert broken.status_code == 500
        assert broken.json()["error"]["code"] == "internal_error"
        with http.stream(
            "POST", "/v1/completions", json={**body, "decoder": "beam", "stream": True}
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "internal_error" in lines[-1]
        other.join()
        assert answers[0].json()["choices"][0]["text"] == slow.generate("abc", max_tokens=20).text
    assert_clean(slow)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_request(slow: Any, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    with LiveServer(slow, settings()) as server, client(server) as http:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
            raw.sendall(
                head.encode() + b"Host: localhost\r\nContent-Type: application/json\r\n\r\n" + body
            )
            wait_until(lambda: slow.engine.num_tokens > 3)
        wait_until(lambda: not slow.engine.has_work)
        assert slow.engine.num_tokens < 1000
        wait_until(lambda: "anydecode_cancelled_requests_total 1.0" in http.get("/metrics").text)
    assert_clean(slow)


def test_a_stalled_stream_is_cancelled(llm: Any) -> None:
    body = {"prompt": ["abc"] * 30, "max_tokens": 3000, "stream": True, "logprobs": 20}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    with LiveServer(llm, settings(stall_seconds=0.3)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n"
            raw.sendall(
                head.encode() + b"Host: localhost\r\nContent-Type: application/json\r\n\r\n" + data
            )
            wait_until(lambda: llm.engine.num_tokens > 30)
            wait_until(lambda: not llm.engine.has_work, 20)
        assert llm.engine.num_tokens < 30 * 3000
    assert_clean(llm)


def test_the_server_responds_during_a_forward_pass(llm: Any) -> None:
    """During a forward pass the server still accepts, refuses and cancels requests."""
    runner = llm.engine.runners["target"]
    run, has_started, may_continue = runner.run, threading.Event(), threading.Event()
    start, started = llm.start, []

    def count_started(request: Request) -> None:
        start(request)
        started.append(request)

    llm.start = count_started

    def blocked_run(plan: Any) -> Any:
        has_started.set()
        may_continue.wait(20)
        return run(plan)

    runner.run = blocked_run
    with LiveServer(llm, settings()) as server, client(server) as http:
        threads = [
            threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": LONG})
            for _ in range(3)
        ]
        threads[0].start()
        has_started.wait(20)
        for further in threads[1:]:
            further.start()
        wait_until(lambda: len(started) == 3)
        assert http.get("/health", timeout=5).status_code == 200
        runner.run = run
        may_continue.set()
        for one in threads:
            one.join()
    assert_clean(llm)


def test_metrics_count_requests_and_tokens(llm: Any) -> None:
    with LiveServer(llm, settings()) as server, client(server) as http:
        body = {"prompt": "abc", "max_tokens": 7, "temperature": 0, "ignore_eos": True}
        body["decoder"] = "autoregressive"
        for _ in range(3):
            assert http.post("/v1/completions", json=body).status_code == 200
        lines = dict(
            line.rsplit(" ", 1)
            for line in http.get("/metrics").text.splitlines()
            if not line.startswith("#")
        )
        path = 'endpoint="/v1/completions",status="200"'
        assert lines[f"anydecode_requests_total{{{path}}}"] == "3.0"
        assert lines["anydecode_generation_tokens_total"] == "21.0"
        assert lines["anydecode_prompt_tokens_total"] == "9.0"
        assert lines["anydecode_time_to_first_token_seconds_count"] == "3.0"
        assert lines["anydecode_time_per_output_token_seconds_count"] == "3.0"
        assert lines["anydecode_running_sequences"] == "0.0"
        assert lines["anydecode_preemptions_total"] == "0.0"
        assert lines['anydecode_cache_positions{runner="target"}'] == "4096.0"
        # The engine counts after it has announced the end of a request.
        wait_until(lambda: http.get("/live").json()["num_tokens"] == 21)
        assert http.get("/live").json()["running"] == 0
        keys = [entry["key"] for entry in http.get("/decoders").json()["decoders"]]
        assert "prompt-lookup" in keys and "llada" not in keys


def test_logs_are_json(llm: Any) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logs.JsonLines().format(record))  # type: ignore[method-assign]
    logs.log.addHandler(handler)
    logs.log.setLevel("INFO")
    try:
        with LiveServer(llm, settings()) as server, client(server) as http:
            body = {"prompt": "abc", "max_tokens": 3, "decoder": "autoregressive"}
            answer = http.post("/v1/completions", json=body)
            wait_until(lambda: bool(lines))
    finally:
        logs.log.removeHandler(handler)
    line = json.loads(lines[0])
    assert line["id"] == answer.headers["x-request-id"]
    assert (line["status"], line["path"], line["prompt_tokens"]) == (200, "/v1/completions", 3)
    assert line["completion_tokens"] <= 3 and line["decoder"] == "autoregressive"


@pytest.mark.parametrize(("drain", "stream"), [(10.0, False), (0.1, False), (0.1, True)])
def test_a_shutdown_drains_and_then_cancels(
    slow: Any, drain: float, stream: bool, caplog: Any
) -> None:
    whole = drain > 1
    body = {"prompt": "abc", "max_tokens": 25 if whole else 3000, "ignore_eos": True}
    answers: list[Any] = []
    with LiveServer(slow, settings(drain_seconds=drain)) as server, client(server) as http:

        def ask() -> None:
            try:
                answers.append(http.post("/v1/completions", json={**body, "stream": stream}))
            except httpx.HTTPError:
                pass

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: slow.engine.num_tokens > 2)
        server.stop()
        thread.join()
    [answer] = answers
    assert answer.status_code == (200 if whole or stream else 503)
    if not whole:
        last = answer.text.rpartition("data: ")[2]
        error = {"message": "the server is shutting down", "param": None, "code": None}
        assert error.items() <= json.loads(last)["error"].items()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert_clean(slow)


def test_a_draining_server_refuses_new_work(llm: Any) -> None:
    app = create_app(llm, settings())
    app.draining = True

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            refused = await http.post("/v1/completions", json={"prompt": "a"})
            assert refused.headers["retry-after"] == "5"
            return [refused.status_code, (await http.get("/health")).status_code]

    assert asyncio.run(ask()) == [503, 503]


@pytest.mark.slow
def test_soak(llm: Any) -> None:
    """Random lengths, cancellations, invalid bodies and disconnects: nothing leaks, and every
    answer equals that of the same request alone."""
    generator = random.Random(7)
    answered: list[tuple[dict[str, Any], str]] = []

    async def one(http: Any, kind: str, body: dict[str, Any]) -> None:
        if kind == "bad":
            answer = await http.post("/v1/completions", json={**body, "temperature": -1})
            assert answer.status_code == 400
        elif kind == "whole":
            answer = await http.post("/v1/completions", json=body)
            answered.append((body, answer.json()["choices"][0]["text"]))
        else:
            leave = generator.randrange(1, 4) if kind == "leave" else None
            text = ""
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as s:
                async for line in s.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if leave is not None and (leave := leave - 1) == 0:
                            return
            if kind == "stream":
                answered.append((body, text))

    async def soak(url: str) -> None:
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as h:
            tasks = []
            for _ in range(300):
                body = {
                    "prompt": generator.choice("abcdef") * generator.randrange(1, 120),
                    "max_tokens": generator.randrange(1, 16),
                    "seed": generator.randrange(4),
                    "temperature": generator.choice([0, 0.8]),
                    "decoder": generator.choice(["autoregressive", "prompt-lookup", "suffix"]),
                }
                kinds = ["whole"] * 4 + ["stream"] * 4 + ["leave"] * 2 + ["bad", "cancel"]
                kind = generator.choice(kinds)
                task = asyncio.ensure_future(one(h, "stream" if kind == "cancel" else kind, body))
                if kind == "cancel":
                    asyncio.get_running_loop().call_later(generator.random() * 0.5, task.cancel)
                tasks.append(task)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [r for r in results if isinstance(r, Exception)]
            assert not wrong, wrong[:3]

    with LiveServer(llm, settings(max_requests=1000)) as server:
        asyncio.run(soak(server.url))
    assert len(answered) > 150
    assert_clean(llm)
    llm.resources = replace(llm.resources, prefix_cache=False)
    for body, text in answered:
        options = {key: body[key] for key in ("max_tokens", "seed", "temperature")}
        assert llm.generate(body["prompt"], **options).text == text
    body, text = answered[0]
    other = llm.generate(body["prompt"] + "!", max_tokens=16, seed=99, temperature=0.8).text
    assert (
        other != text
    )  # texts of different requests differ, so the comparison above is meaningful


def test_preemption_changes_no_text() -> None:
    model = ScriptedModel(seed=1)
    from anydecode.api.llm import LLM
    from anydecode.models.scripted import ByteTokenizer

    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=200) as llm:
        with LiveServer(llm, settings()) as server, client(server) as http:
            body = {"prompt": "abc" * 10, "max_tokens": 60, "ignore_eos": True, "n": 6, "seed": 1}
            answer = http.post("/v1/completions", json=body).json()
            assert llm.engine.num_preemptions > 0
            alone = llm.generate(
                "abc" * 10, max_tokens=60, ignore_eos=True, n=6, seed=1, temperature=1.0
            )
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [sample.text for sample in alone.samples]


def tool_parser(name: str, reasoning: tuple[str, str] | None = None) -> Parser:
    return Parser(reasoning, lambda stream: TOOL_FORMATS[name].parse(stream, {}))


def test_parsers_split_answers_at_any_chunk_size() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    text = f"hm<think>why\n</think>\n\nso <b> {call}"
    for size in (1, 2, 3, 7, 1000):
        parser = tool_parser("hermes", ("<think>", "</think>"))
        texts = dict.fromkeys(("content", "reasoning", "call", "arguments", "end"), "")
        for at in range(0, len(text), size):
            for kind, value in parser.push(text[at : at + size]):
                texts[kind] += value
        for kind, value in parser.push("", final=True):
            texts[kind] += value
        assert texts == {
            "content": "hmso <b> ", "reasoning": "why\n", "call": "f", "arguments": '{"x": 1}',
            "end": "",
        }  # fmt: skip
    listed = tool_parser("mistral")
    events = list(listed.push('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b"}]', True))
    assert [value for kind, value in events if kind == "call"] == ["a", "b"]
    broken = tool_parser("hermes")
    events = list(broken.push("<tool_call>no json</tool_call>", True))
    assert "".join(value for _, value in events) == "<tool_call>no json</tool_call>"
    assert {kind for kind, _ in events} == {"content"}
    thinking = Parser(("<think>", "</think>"), None, thinking=True)
    assert list(thinking.push("a</think>b", True)) == [("reasoning", "a"), ("content", "b")]


def test_bodies_must_be_json_and_are_in_the_openapi_schema(slow: Any) -> None:
    """Browsers let pages of other origins send text without a CORS preflight, but not JSON. They
    name the origin of the page, which other programs do not send."""
    valid, path = b'{"prompt": "a", "max_tokens": 1}', "/v1/completions"
    with LiveServer(slow, settings()) as server, client(server) as http:

        def status(kind: str | None, body: bytes = valid, origin: str | None = None) -> int:
            given = {"content-type": kind, "origin": origin}
            headers = {name: value for name, value in given.items() if value is not None}
            return int(http.post(path, content=body, headers=headers).status_code)

        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/x+json"):
            assert status(kind) == status(kind, origin="http://evil.example") == 200
        form = "application/x-www-form-urlencoded"
        for kind in (None, "text/plain", "text/json", form):
            assert status(kind) == 200
            for origin in ("http://evil.example", "null", str(http.base_url).rstrip("/")):
                assert status(kind, origin=origin) == 400
        for invalid in (b"", b"{", b"[]", b'"a"', b'{"prompt": "\xff"}', b"[" * 5000):
            assert status("application/json", invalid) == 400
        error = http.post(path, json={"prompt": "a", "n": "many"}).json()["error"]
        assert (error["param"], error["code"]) == ("n", "invalid_body")
        request_body = http.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]
        body_schema = request_body["content"]["application/json"]["schema"]
        assert request_body["required"] and body_schema["$ref"].endswith("/CompletionRequest")


def test_traces_are_read_and_scaled(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:05.0000000,400,10\n2023-11-16 18:17:03.5000000,30,8\n"
    )
    assert read_trace(azure) == [Arrival(0.0, 30, 8), Arrival(1.5, 400, 10)]
    mooncake = tmp_path / "m.jsonl"
    row = {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}
    mooncake.write_text(json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 2500}) + "\n")
    trace = read_trace(mooncake)
    assert trace[1] == Arrival(2.0, 700, 5, (4, 5))
    options = {"rate": 4.0, "longest": 256, "output": 3, "shrink": 0.5}
    halves = scaled(trace, requests=2, **options)
    assert halves[1] == Arrival(0.25, 256, 2, (4, 5), block=256)
    assert prompt_text(halves[1], 1) == prompt_text(replace(halves[1], blocks=(4, 9)), 1)
    longer = replace(halves[1], prompt=300)  # past the first block, which has shrunk by half
    assert prompt_text(longer, 1) != prompt_text(replace(longer, blocks=(4, 9)), 1)
    texts = [prompt_text(arrival, number) for number, arrival in enumerate(trace)]
    assert texts[0] == texts[1] and len(texts[0].split()) == 700
    assert prompt_text(Arrival(0, 9, 1), 0) != prompt_text(Arrival(0, 9, 1), 1)
    salted = prompt_text(trace[0], 0, "round 2 ").split()
    assert salted[:16] != texts[0].split()[:16] and len(salted) == 700
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequestError, match="x.csv is not a trace"):
        read_trace(tmp_path / "x.csv")


def test_replay_results_match_a_hand_computation() -> None:
    outcomes = [
        RequestOutcome(0.0, 5, 0.1, 1.1, 11, [0.1 + 0.1 * step for step in range(11)]),
        RequestOutcome(1.0, 5, 0.9, 1.0, 2, [0.9, 1.0]),
        RequestOutcome(2.0, 5, 0.2, 2.2, 3, [0.2, 0.7, 2.2]),
        RequestOutcome(3.0, 5, error="429"),
    ]
    results = summary(outcomes, Objective(ttft=0.5, tpot=0.15))
    assert results["attainment"] == 0.25
    assert results["seconds"] == pytest.approx(4.2)
    assert results["goodput_requests_per_second"] == pytest.approx(1 / 4.2)
    assert results["goodput_tokens_per_second"] == pytest.approx(11 / 4.2)
    assert results["ttft"] == {"p50": 0.2, "p99": 0.9}
    assert results["tpot"] == pytest.approx({"p50": 0.1, "p99": 1.0})
    assert results["itl"] == pytest.approx({"p50": 0.1, "p99": 1.5})
    assert results["prompt_tokens"] == 20
    # The second waits from 1.0 to 1.9, beside one gap of the first; the third from 2.0 to 2.2.
    assert gaps_during_prefill(outcomes) == pytest.approx([0.1])
    outcomes[3] = RequestOutcome(
        2.6, 5, first=0.3
    )  # the end of a gap, and the beginning of the next
    assert gaps_during_prefill(outcomes) == pytest.approx([0.1, 0.5, 1.5])
    assert parse_objective("ttft=1") == Objective(1.0, float("inf"))
    with pytest.raises(InvalidRequestError, match="--slo"):
        parse_objective("speed=3")


def test_a_trace_is_replayed_against_a_server(llm: Any, tmp_path: Path) -> None:
    trace = tmp_path / "m.jsonl"
    rows = [{"timestamp": 50 * i, "input_length": 30, "output_length": 6} for i in range(8)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with LiveServer(llm, settings()) as server:
        options = {
            "--trace": trace, "--url": f"{server.url}/v1", "--model": "scripted",
            "--slo": "ttft=10,tpot=10", "--requests": 8, "--rate": 40, "--longest": 64,
            "--output": 6, "--json": tmp_path / "out.json", "--plot": tmp_path / "out.svg",
        }  # fmt: skip
        run_bench("serving", [str(word) for option in options.items() for word in option])
    output = json.loads((tmp_path / "out.json").read_text())
    report = output["servers"]["anydecode"]
    assert output["rounds"] == 1
    assert (report["requests"], report["failed"], report["attainment"]) == (8, 0, 1.0)
    assert report["tokens"] == 48
    assert "m.jsonl, 40/s" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("mistaken", [False, True])
def test_a_traced_stream_sends_the_canvas(path: str, mistaken: bool, monkeypatch: Any) -> None:
    """With a trace, the stream of a diffusion model sends the canvas of each pass, before any text.
    The mistake: progress is reported for tokens only."""
    run, notify = ScriptedModel.run, Request.notify

    def slow_run(self: ScriptedModel, *args: Any) -> Any:
        time.sleep(0.01)
        return run(self, *args)

    def notify_of_tokens(self: Request, callback: Callable[[], Any]) -> None:
        def progressed() -> None:
            if any(job.sequence.tokens for job in self.jobs):
                callback()

        notify(self, progressed)

    monkeypatch.setattr(ScriptedModel, "run", slow_run)
    if mistaken:
        monkeypatch.setattr(Request, "notify", notify_of_tokens)

    def streamed(**more: Any) -> tuple[list[list[str | None]], str, dict[str, Any]]:
        inputs = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        inputs.pop("messages" if path == "completions" else "prompt")
        body = {**inputs, "max_tokens": 24, "seed": 4, "temperature": 1.5, "stream": True, **more}
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, trust_env=False)
        parts = [json.loads(x[6:]) for x in answer.text.split("\n\n") if x[6:].startswith("{")]
        extensions = [part.get("anydecode", {}) for part in parts]
        text = "".join(
            one.get("text") or one.get("delta", {}).get("content") or ""
            for part in parts
            for one in part["choices"]
        )
        return [one["canvas"] for one in extensions if "canvas" in one], text, extensions[-1]

    with scripted_llm(causal=False) as llm, LiveServer(llm, settings()) as server:
        canvases, text, last = streamed(trace=True, decoder="llada")
        again, same, _ = streamed(decoder="llada")
    assert (same, again) == (text, [])
    assert any(None in one and one[0] is None for one in canvases) != mistaken
    masks = [one.count(None) for one in canvases]
    assert masks == sorted(masks, reverse=True) and masks[-1] == 0
    shown, generated = (
        "".join(filter(str.isascii, characters))  # a position may hold a part of other characters
        for characters in ("".join(filter(None, canvases[-1])), text)
    )
    assert shown.startswith(generated) and last["seed"] == 4


@pytest.mark.parametrize("causal, draft_causal", [(True, True), (True, False), (False, True)])
def test_the_list_of_decoders_has_those_that_requests_may_select(
    causal: bool, draft_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_llm(causal=causal, draft_causal=draft_causal) as llm:
        with LiveServer(llm, settings()) as server, client(server) as http:
            listed = {entry["key"] for entry in http.get("/decoders").json()["decoders"]}
            monkeypatch.setattr(catalogue, "entries", dict)  # not read again
            assert {entry["key"] for entry in http.get("/decoders").json()["decoders"]} == listed
        monkeypatch.undo()
        for key in catalogue.entries():
            if issubclass(catalogue.kind_of(key), Decoder):
                try:
                    llm.resources.check_decoder(key, catalogue.build(key).requirements)
                except UnsupportedCombinationError:
                    assert key not in listed
                else:
                    assert key in listed
    assert ("pearl" in listed) == (causal and draft_causal)
    assert ("deer" in listed) == (causal and not draft_causal)
    assert ("llada" in listed) == (not causal)


def test_the_serve_command_shuts_down_on_sigterm(tmp_path: Path) -> None:
    program = (
        "import anydecode.api.llm, anydecode.certification.checks as c, anydecode;"
        "anydecode.api.llm.LLM = lambda name, **o: c.scripted_llm();"
        "from anydecode.cli.main import run; run(['serve', 'scripted', '--port', '0'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line)["event"])
        if "Uvicorn running" in lines[-1]:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert lines[0] == "start"
    assert json.loads(rest.splitlines()[-1])["event"] == "stop"
