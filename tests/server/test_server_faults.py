"""A stopped engine, in the server and in the Python API: all requests fail at once instead of
waiting."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient  # noqa: E402

from anydecode import catalogue  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.decoders.decoder import Decoder  # noqa: E402
from anydecode.decoders.diffusion.learn2pd import SHIPPED  # noqa: E402
from anydecode.errors import CheckpointError, EngineStoppedError, InvalidRequestError  # noqa: E402
from anydecode.server.app import create_app  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

WAIT = 20.0


class UncatchableFault(BaseException):
    """An exception that `except Exception` does not catch."""


FAULTS = [
    ZeroDivisionError("a secret of\nthe engine"),
    MemoryError(),
    UncatchableFault("out of nowhere"),
]


@pytest.fixture
def llm() -> Iterator[Any]:
    """An engine that runs at most two sequences at once, so that others wait."""
    with scripted_llm(max_running=2) as llm:
        yield llm


def stop_at(llm: Any, fault: BaseException, ready: Callable[[], bool]) -> None:
    """Make `Engine.step` raise `fault` once `ready`. Each step sleeps briefly, so that all requests
    can start."""
    step = llm.engine.step

    def failing() -> None:
        time.sleep(0.005)
        if ready():
            raise fault
        step()

    llm.engine.step = failing


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_stopped_engine_fails_all_requests_at_once(
    llm: Any, fault: BaseException, caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    long = {"max_tokens": 2000, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "abc", "stream": True}),
        ("/v1/responses", {"input": "abc", "stream": True}),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/completions", {"prompt": "abd"}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "abe"}),
    ]
    responses: dict[int, Any] = {}
    engine = llm.engine
    stop_at(llm, fault, lambda: len(engine.running) == 2 and len(engine.waiting) >= 4)
    with (
        LiveServer(llm, Settings(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
    ):
        assert http.get("/health").json() == {"status": "ok"}
        assert "anydecode_engine_up 1.0" in http.get("/metrics").text

        def ask(index: int) -> None:
            path, body = bodies[index]
            responses[index] = http.post(path, json={**body, **long})

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for one in threads:
            one.start()
        for one in threads:
            one.join(WAIT)
        assert sorted(responses) == [*range(len(bodies))]
        for index in (0, 2):
            error = events(responses[index].text)[-1]["error"]
            assert error["code"] == "engine_stopped" and error["type"] == "server_error"
        last = events(responses[1].text)
        assert [event["type"] for event in last[-2:]] == ["error", "response.failed"]
        assert last[-2]["code"] == "engine_stopped"
        assert last[-1]["response"]["status"] == "failed"
        assert last[-1]["response"]["error"]["message"] == last[-2]["message"]
        for index in (3, 4, 5):
            assert responses[index].status_code == 503
            assert responses[index].json()["error"]["code"] == "engine_stopped"
        for path, body in bodies:  # new requests, also streamed
            answer = http.post(path, json={**body, **long})
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert type(fault).__name__ in message and "\n" not in message
            assert "secret" not in message
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 503
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "stopped"
        assert type(fault).__name__ in health.json()["reason"]
        assert "anydecode_engine_up 0.0" in http.get("/metrics").text
        assert http.get("/v1/models").status_code == 200
    assert not engine.has_work


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_calls_of_a_stopped_engine_raise(llm: Any, fault: BaseException, caplog: Any) -> None:
    """Without a background thread: concurrent callers, and later ones."""
    caplog.set_level(logging.CRITICAL + 1)
    options = {"max_tokens": 500, "ignore_eos": True}
    engine = llm.engine
    stop_at(llm, fault, lambda: len(engine.running) + len(engine.waiting) >= 4)
    raised: list[BaseException] = []

    def call() -> None:
        with pytest.raises(EngineStoppedError, match=type(fault).__name__) as error:
            llm.generate("abc", **options)
        raised.append(error.value)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(WAIT)
    assert len(raised) == 4 and all(error.__cause__ is fault for error in raised)
    with pytest.raises(EngineStoppedError):
        llm.generate("abc", **options)
    with pytest.raises(EngineStoppedError):
        list(llm.stream("abc", **options))
    with pytest.raises(EngineStoppedError):
        llm.score("abc", "def")
    with pytest.raises(EngineStoppedError):
        asyncio.run(llm.agenerate("abc", **options))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_calls_of_a_stopped_engine_raise_in_asyncio(
    llm: Any, fault: BaseException, caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    options = {"max_tokens": 500, "ignore_eos": True}
    engine = llm.engine
    stop_at(llm, fault, lambda: len(engine.running) + len(engine.waiting) >= 5)

    async def stream() -> None:
        async for _ in llm.astream("abc", **options):
            pass

    async def all_calls() -> None:
        for count in (3, 1):  # pending calls, then new ones
            calls = [llm.agenerate("abc", **options) for _ in range(count)]
            calls += [stream() for _ in range(2)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in results] == [EngineStoppedError] * len(calls)

    asyncio.run(asyncio.wait_for(all_calls(), WAIT))


def test_a_call_that_is_interrupted_stops_nothing(llm: Any) -> None:
    step = llm.engine.step

    def interrupted() -> None:
        llm.engine.step = step
        raise KeyboardInterrupt

    expected = llm.generate("abc", max_tokens=5).text
    llm.engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", max_tokens=5)
    assert llm.driver.error is None
    assert llm.generate("abc", max_tokens=5).text == expected


class Panics(Decoder):
    """Panics after some tokens, as a native library may, and again when it is closed."""

    def decode(self, sequence: Any) -> Any:
        try:
            while len(sequence.tokens) < 5:
                scores = yield sequence.score(sequence.unscored())
                sequence.emit([scores.sampled[-1]])
            raise UncatchableFault("a panic")
        finally:
            raise UncatchableFault("a panic at the end")


def test_a_panic_ends_all_requests(llm: Any, caplog: Any) -> None:
    """On the engine's thread, in a caller's thread, and afterwards."""
    caplog.set_level(logging.CRITICAL + 1)
    options: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "decoder": Panics()}

    async def all_calls() -> list[Any]:
        calls = [llm.agenerate("abc", **options) for _ in range(6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(all_calls(), WAIT))
    assert [type(one) for one in results] == [EngineStoppedError] * 6
    with pytest.raises(EngineStoppedError, match="UncatchableFault"):
        llm.generate("abc")
    with scripted_llm() as other:
        with pytest.raises(EngineStoppedError, match="UncatchableFault"):
            other.generate("abc", **options)
        with pytest.raises(EngineStoppedError, match="UncatchableFault"):
            other.generate("abc")


def test_a_panic_in_a_handler_is_a_500_of_its_request(
    llm: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    encode = llm.tokenizer.encode

    def panics(prompt: Any, **options: Any) -> Any:
        if prompt == "panic":
            raise UncatchableFault("a panic")
        return encode(prompt, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", panics)
    with (
        LiveServer(llm, Settings(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
    ):
        for prompt, status in (("panic", 500), ("a", 200)):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "internal_error"


_PROGRAM = """
import sys
from anydecode.certification.checks import scripted_llm
from anydecode.errors import EngineStoppedError
from anydecode.server.running import serve
from anydecode.server.settings import Settings
class Panic(BaseException):
    pass
llm = scripted_llm()
step = llm.engine.step
def failing():
    if llm.engine.num_tokens > 50:
        raise Panic("of a library")
    step()
llm.engine.step = failing
try:
    serve(llm, Settings(port=0, drain_seconds=float(sys.argv[1])))
except EngineStoppedError as error:
    sys.exit(f"stopped: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("drain", [0, 1000])
def test_a_server_process_reports_its_stopped_engine_and_then_fails(drain: int) -> None:
    """A supervisor sees an exit status other than 0, after the drain or SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(drain)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        url = next(
            found[1]
            for line in process.stderr
            if (found := re.search(r"running on (http://[0-9.:]+)", line))
        )
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.extend(process.stderr), daemon=True)
        reader.start()
        with httpx.Client(base_url=url, timeout=WAIT, trust_env=False) as http:
            body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
            streamed = http.post("/v1/completions", json={**body, "stream": True})
            assert events(streamed.text)[-1]["error"]["code"] == "engine_stopped"
            if drain:
                assert http.post("/v1/completions", json=body).status_code == 503
                assert http.get("/health").status_code == 503
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        reader.join(WAIT)
        assert rest[-1].startswith("stopped: the engine stopped after an internal error: Panic")
    finally:
        process.kill()


_ENDLESS_PROGRAM = """
import sys, time
from anydecode.certification.checks import scripted_llm
from anydecode.server.running import serve
from anydecode.server.settings import Settings
llm = scripted_llm()
step = llm.engine.step
def slow():
    time.sleep(0.005)
    step()
    if 0 < llm.engine.num_tokens < 10:
        print("generates", file=sys.stderr, flush=True)
llm.engine.step = slow
serve(llm, Settings(port=0, drain_seconds=1000))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process")
@pytest.mark.parametrize("stream", [False, True])
def test_a_second_interrupt_answers_the_running_requests(stream: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS_PROGRAM], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr)
        url = next(
            found[1]
            for line in lines
            if (found := re.search(r"running on (http://[0-9.:]+)", line))
        )
        answers: list[httpx.Response] = []
        with httpx.Client(base_url=url, timeout=WAIT, trust_env=False) as http:
            body = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
            thread = threading.Thread(
                target=lambda: answers.append(http.post("/v1/completions", json=body)), daemon=True
            )
            thread.start()
            assert any("generates" in line for line in lines)
            process.send_signal(signal.SIGINT)
            assert any("Shutting down" in line for line in lines)
            process.send_signal(signal.SIGINT)
            thread.join(WAIT)
        process.wait(WAIT)
        [answer] = answers
        assert answer.status_code == (200 if stream else 503)
        error = events(answer.text)[-1] if stream else answer.json()
        assert error["error"]["message"] == "the server is shutting down"
    finally:
        process.kill()


class FailsAtStart(Decoder):
    """Raises when its generator is created."""

    def decode(self, sequence: Any) -> Any:
        raise ZeroDivisionError("a fault before the first token")


class FailsAtClose(Decoder):
    """Raises when its generator is closed."""

    def decode(self, sequence: Any) -> Any:
        try:
            while True:
                scores = yield sequence.score(sequence.unscored())
                sequence.emit([scores.sampled[-1]])
        finally:
            raise ZeroDivisionError("a fault at the end")


class RequestsInvalidToken(Decoder):
    """Yields a score request with an invalid token."""

    def __init__(self, token: Any) -> None:
        self.token = token

    def decode(self, sequence: Any) -> Any:
        scores = yield sequence.score(sequence.unscored())
        sequence.emit([scores.sampled[-1]])
        yield sequence.score([*sequence.unscored(), self.token])


@pytest.mark.parametrize("token", [1 << 20, -1, "x", None])
def test_invalid_tokens_of_a_decoder_end_only_its_request(
    llm: Any, token: Any, caplog: Any
) -> None:
    """An invalid score request is excluded from the forward pass that it would share with
    others."""
    caplog.set_level(logging.CRITICAL + 1)
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    expected = llm.generate("abc", **options).text
    other = llm.request("abc", **options)
    invalid = llm.request("abc", decoder=RequestsInvalidToken(token), **options)
    for request in (invalid, other):
        llm.start(request, background=False)
    llm.driver.advance(lambda: other.done and invalid.done)
    assert other.generation().text == expected
    with pytest.raises((InvalidRequestError, RuntimeError)):
        invalid.generation()
    assert llm.driver.error is None and not llm.engine.has_work
    llm.engine.check_integrity()
    llm.clear()
    assert all(runner.pool.num_used == 0 for runner in llm.engine.runners.values())


def test_a_fault_of_one_request_does_not_stop_the_engine(llm: Any, caplog: Any) -> None:
    """Faults of the decoder at its start and end, of the sampler, and of the callback."""
    caplog.set_level(logging.CRITICAL + 1)
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    expected = llm.generate("abc", **options).text
    with pytest.raises(RuntimeError, match="before the first token"):
        llm.generate("abc", decoder=FailsAtStart(), **options)
    stream = llm.stream("abc", decoder=FailsAtClose(), max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()

    def fault() -> None:
        raise ZeroDivisionError("a fault of one request")

    request = llm.request("abc", **options)
    request.jobs[0].sequence.sampler.prepare = fault
    request.notify(fault)
    llm.start(request, background=False)
    llm.driver.advance(lambda: request.done)
    assert request.generation().text == expected
    assert llm.driver.error is None and not llm.engine.has_work
    assert llm.generate("abc", **options).text == expected
    llm.engine.check_integrity()


AUDITED_EVENTS = {  # audit events of file and network access
    "open", "os.mkdir", "os.listdir", "os.scandir", "os.rename", "os.remove", "socket.connect",
    "socket.getaddrinfo", "subprocess.Popen",
}  # fmt: skip
_touched: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event in AUDITED_EVENTS:
        _touched.append(f"{event} {arguments!r}")


def audited(call: Callable[[], Any], name: str) -> tuple[Any, list[str]]:
    """The result of `call`, and the audit events during it whose arguments contain `name`."""
    global _touched
    if _audit not in _hooks:
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    _touched = []
    try:
        return call(), [one for one in _touched if name in one]
    finally:
        _touched = None


_hooks: list[Any] = []


def test_request_decoders_access_no_files(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file name as every parameter of every method, no file is read or created."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leak").write_text("secret\tsecret\n")
    choices = [
        f"{key}:{name}={value}"
        for key, entry in sorted(catalogue.entries().items())
        for name in inspect.signature(entry.build).parameters
        for value in ("leak", "leak2")
    ]
    with TestClient(create_app(llm), base_url="http://localhost") as http:

        def ask_all() -> dict[str, Any]:
            ask = {"prompt": "a", "max_tokens": 1}
            return {
                choice: http.post("/v1/completions", json={**ask, "decoder": choice})
                for choice in choices
            }

        answers, accesses = audited(ask_all, "leak")
        assert accesses == [] and [path.name for path in tmp_path.iterdir()] == ["leak"]
        for choice, answer in answers.items():
            assert answer.status_code in (200, 400), (choice, answer.text)
            assert answer.status_code == 200 or "\n" not in answer.json()["error"]["message"]
        for choice in ("learn2pd:filter=leak", "autodeco:heads=leak", "monitors:path=leak"):
            assert "only the server's own options" in answers[choice].text
        beyond_bounds = (
            "beam:width=4096", "easyspec:size=4000", "fastkv:decoder=beam:width=4096",
            "rsd:branching=64-64-64", "suffix:memory=1",
        )  # fmt: skip
        for choice in beyond_bounds:
            answer = http.post("/v1/completions", json={"prompt": "a", "decoder": choice})
            assert answer.status_code == 400 and "requests" in answer.text, answer.text
            assert answer.json()["error"]["param"] == "decoder"
        for key in ("sarathi", "first-finish", "dlm-ptq", "prefix-spill", "smartspec-server"):
            answer = http.post("/v1/completions", json={"prompt": "a", "decoder": key})
            assert answer.status_code == 400 and "not a decoder" in answer.text
        answer = http.post("/v1/completions", json={"prompt": "a", "decoder": "monitors"})
        assert answer.status_code == 400 and "reads files" in answer.text
    for option in (
        "decoder",
        "sampler",
        "constraint",
    ):  # in the Python API too, only the right kind of method is accepted
        with pytest.raises(InvalidRequestError, match="'prefix-spill' is not"):
            llm.generate("a", **{option: "prefix-spill:where=leak2"})
    assert not (tmp_path / "leak2").exists()
    assert audited(lambda: (tmp_path / "leak").read_text(), "leak")[1]  # the audit detects access


def test_the_default_decoder_may_read_files(tmp_path: Path) -> None:
    """The operator may choose decoders that requests may not."""
    heads = tmp_path / "heads.safetensors"
    with scripted_llm() as llm, pytest.raises(CheckpointError, match=r"heads\.safetensors"):
        llm.generate("a", decoder=f"autodeco:heads={heads}", temperature=1)
    with scripted_llm(causal=False) as llm:
        named = Settings(decoder=f"learn2pd:filter={SHIPPED},cache=none")
        with TestClient(create_app(llm, named), base_url="http://localhost") as http:
            ask = {"prompt": "a", "max_tokens": 4}
            answer = http.post("/v1/completions", json=ask)
            assert "reads files" not in answer.text and "names a file" not in answer.text
            refused = http.post("/v1/completions", json={**ask, "decoder": named.decoder})
            assert refused.status_code == 400 and "filter names a file" in refused.text


def test_the_operator_may_allow_decoders_beyond_the_bounds(llm: Any) -> None:
    settings = Settings(allowed_decoders=("beam:width=17",))
    with TestClient(create_app(llm, settings), base_url="http://localhost") as http:
        for width, status in ((16, 200), (17, 200), (18, 400)):
            ask = {"prompt": "a", "max_tokens": 1, "decoder": f"beam:width={width}"}
            assert http.post("/v1/completions", json=ask).status_code == status


def test_schema_references_are_not_fetched(llm: Any, tmp_path: Path) -> None:
    """External references of a schema are refused, not followed."""
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema_rs")
    (tmp_path / "part.json").write_text('{"const": "secret"}')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        web = f"http://127.0.0.1:{listening.getsockname()[1]}/part.json"
        with TestClient(create_app(llm), base_url="http://localhost") as http:
            for location in (web, (tmp_path / "part.json").as_uri()):
                reference: dict[str, Any] = {"$ref": location}
                for schema in (
                    reference,
                    {"type": "object", "properties": {"a": reference}, "required": ["a"]},
                    {"type": "object", "propertyNames": {"allOf": [reference]}, "minProperties": 1},
                    {"$schema": location, "type": "string"},
                    {"anyOf": [{"not": reference}, {"type": "integer"}]},
                ):
                    form = {"type": "json_schema", "json_schema": {"schema": schema}}
                    ask = {"prompt": "a", "max_tokens": 4, "response_format": form}
                    answer = http.post("/v1/completions", json=ask)
                    assert answer.status_code == 400, (schema, answer.text)
                    assert "secret" not in answer.text
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize("fault", [KeyError("x"), UncatchableFault("x")], ids=["error", "panic"])
def test_a_connection_outlives_an_unexpected_error(
    llm: Any, fault: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL + 1)

    async def fail(*arguments: Any) -> Any:
        raise fault

    monkeypatch.setattr("anydecode.server.app.embed", fail)
    with LiveServer(llm, Settings(port=0)) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=WAIT)
        sockets = []
        for path, body, status in (
            ("/v1/embeddings", {"input": "a"}, 500),
            ("/v1/completions", {"prompt": "a", "max_tokens": 2}, 200),
        ):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == status and json.loads(answer.read())
            sockets.append(connection.sock)
        assert sockets[0] is sockets[1] is not None
        connection.close()
