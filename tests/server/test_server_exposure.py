"""Logs, traces and metrics of a server contain no text of its requests and no API key."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server import logs  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

WORD = "xylophone"
KEYS = ("the-key-of-one", "the-key-of-two")

PROGRAM = """
import sys
from anydecode.catalogue import Card, register
from anydecode.certification.checks import scripted_llm
from anydecode.decoders.decoder import Decoder
from anydecode.server.running import serve
from anydecode.server.settings import Settings

def quote(sequence):
    text = bytes(sequence.prompt).decode()
    try:
        raise KeyError(text)
    except KeyError as error:
        raise ValueError(text) from error

@register(Card("fails-early", "search", "", "lossy"))
class FailsEarly(Decoder):
    def prepare(self, sequence):
        quote(sequence)

    def decode(self, sequence):
        yield sequence.score()

@register(Card("fails-late", "search", "", "lossy"))
class FailsLate(Decoder):
    def decode(self, sequence):
        scores = yield sequence.score()
        sequence.emit([scores.sampled[-1]])
        quote(sequence)

serve(scripted_llm(), Settings(name="m", port=0, api_keys=tuple(sys.argv[1:])))
"""


def ask_everything(url: str) -> tuple[list[int], str]:
    """The statuses of requests that succeed, are refused and fail, each with the word in it; and
    the metrics."""
    prompt = {"prompt": f"{WORD} abc", "max_tokens": 3}
    chat = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 40}

    def constrained(schema: dict[str, Any]) -> dict[str, Any]:
        named = {"name": "s", "schema": schema}
        return {**chat, "response_format": {"type": "json_schema", "json_schema": named}}

    bodies: list[tuple[str, Any]] = [
        ("completions", prompt),
        ("completions", {**prompt, "stream": True, "user": WORD, "stop": [WORD]}),
        ("chat/completions", constrained({"enum": [WORD]})),
        ("chat/completions", constrained({"type": WORD})),
        ("responses", {"input": WORD, "max_output_tokens": 3, "metadata": {"a": WORD}}),
        ("completions", {**prompt, WORD: 1}),
        ("completions", {**prompt, "decoder": f"prompt-lookup:size={WORD}"}),
        ("completions", {**prompt, "temperature": WORD}),
        ("completions", {**prompt, "model": WORD}),
        ("completions", {**prompt, "decoder": "fails-early"}),
        ("completions", {**prompt, "decoder": "fails-late"}),
        ("completions", {**prompt, "decoder": "fails-late", "stream": True}),
    ]
    statuses = []
    for key in KEYS:
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
            for path, body in bodies:
                statuses.append(http.post(f"/v1/{path}?{WORD}=1", json=body).status_code)
            answer = http.post("/v1/chat/completions", json=bodies[2][1]).json()
            assert json.loads(answer["choices"][0]["message"]["content"]) == WORD
            statuses.append(http.post("/v1/completions", content=WORD).status_code)
            for path in (f"/{WORD}", f"/v1/{WORD}", f"/v1/models/{WORD}", f"/page/{WORD}"):
                statuses.append(http.get(path).status_code)
            statuses.append(http.get("/v1/models", headers={"host": WORD}).status_code)
            wrong = {"authorization": f"Bearer {WORD}"}
            statuses.append(http.get("/v1/models", headers=wrong).status_code)
            metrics = http.get("/metrics").text
    return statuses, metrics


@pytest.mark.skipif(sys.platform == "win32", reason="a signal would end the server at once")
def test_nothing_of_a_request_is_logged_traced_or_counted() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    settings = {"OTEL_TRACES_EXPORTER": "console", "PYTHONWARNINGS": "always"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *KEYS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
    )
    assert process.stdout is not None and process.stderr is not None
    spans: list[str] = []
    reader = threading.Thread(target=lambda: spans.append(process.stdout.read()))
    reader.start()
    try:
        written = ""
        while not (found := re.search(r"running on (http://[0-9.:]+)", written)):
            line = process.stderr.readline()
            assert line, written
            written += line
        rest: list[str] = []
        drain = threading.Thread(target=lambda: rest.append(process.stderr.read()))
        drain.start()
        statuses, metrics = ask_everything(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        drain.join()
    finally:
        process.kill()
        reader.join()
    written += rest[0]
    assert set(statuses) == {200, 400, 401, 403, 404, 500}

    # What must be there, so that what follows searches the right texts.
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    tenants = [line["tenant"] for line in requests if line["path"] == "/v1/completions"]
    assert len(requests) == len(statuses) + 2 * 2 and len(set(tenants)) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", tenant) for tenant in tenants)
    tracebacks = [line["traceback"] for line in lines if "traceback" in line]
    assert any(
        "in quote" in one and "KeyError\n" in one and "ValueError\n" in one for one in tracebacks
    )
    assert "anydecode_requests_total" in metrics and "text_completion m" in spans[0]

    tokens = str(list(WORD.encode()))[1:-1]
    hashes = [hashlib.sha256(key.encode()).hexdigest()[:8] for key in KEYS]
    for where in (written, spans[0], metrics):
        for secret in (WORD, tokens, tokens.replace(" ", ""), "the-key", *KEYS, *hashes):
            assert secret not in where, (secret, where[max(0, where.find(secret) - 400) :][:800])


def test_names_of_tenants_are_keyed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Settings(api_keys=KEYS).namespaces.values()
    monkeypatch.delenv(logs.LOG_KEY, raising=False)
    key = logs.log_key()
    assert key != logs.log_key() and len(key) == 32
    assert logs.tenant_name(one, key) != logs.tenant_name(two, key)
    assert logs.tenant_name(one, key) != logs.tenant_name(one, logs.log_key())
    assert logs.tenant_name(None, key) is None
    monkeypatch.setenv(logs.LOG_KEY, "joins the logs")
    assert logs.tenant_name(one, logs.log_key()) == logs.tenant_name(one, logs.log_key())
    monkeypatch.setenv(logs.LOG_KEY, "")
    with pytest.raises(InvalidRequestError, match="ANYDECODE_LOG_KEY is empty"):
        logs.log_key()


def test_a_traceback_has_types_but_no_texts() -> None:
    def record(error: BaseException) -> dict[str, Any]:
        info = (type(error), error, error.__traceback__)
        made = logging.LogRecord("a", logging.ERROR, "", 0, "failed", None, info)
        line: dict[str, Any] = json.loads(logs.JsonLines().format(made))
        return line

    try:
        try:
            raise KeyError(WORD)
        except KeyError:
            raise ValueError(WORD) from None
    except ValueError as error:
        hidden = record(error)["traceback"]
    assert WORD not in hidden and hidden.endswith("ValueError\n") and "KeyError\n" not in hidden
    assert "line" in hidden and __file__ in hidden
    circle = ValueError(WORD)
    circle.__cause__ = KeyError(WORD)
    circle.__cause__.__cause__ = circle
    assert record(circle)["traceback"] == "KeyError\nValueError\n"
