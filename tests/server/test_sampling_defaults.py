"""A server whose requests have the sampling options that the model recommends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server import running  # noqa: E402
from anydecode.server.models import ServedModels  # noqa: E402
from server_client import Client, served  # noqa: E402

OPTIONS = {"temperature": 0.6, "top_k": 3, "top_p": 0.95, "repetition_penalty": 1.05}
MESSAGES = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 3},
    "/v1/messages": {"model": "scripted", "messages": MESSAGES, "max_tokens": 3},
    "/api/generate": {"model": "scripted", "prompt": "abc", "options": {"num_predict": 3}},
    "/api/chat": {"model": "scripted", "messages": MESSAGES, "options": {"num_predict": 3}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        llm.sampling_defaults = OPTIONS
        yield llm


def params(
    client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, **fields: Any
) -> Any:
    """The sampling parameters that a request leads to."""
    made: list[Any] = []
    create = LLM.request

    def record(self: LLM, *given: Any, **options: Any) -> Any:
        made.append(create(self, *given, **options))
        return made[-1]

    monkeypatch.setattr(LLM, "request", record)
    answer = client.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return made[-1].params


@pytest.mark.parametrize("path", BODIES)
def test_requests_that_set_nothing_have_them(
    client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    found = params(client, llm, monkeypatch, path)
    assert {name: getattr(found, name) for name in OPTIONS} == OPTIONS


def test_a_request_sets_each_by_itself(
    client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = params(client, llm, monkeypatch, "/v1/completions", temperature=0, top_k=0)
    assert (found.temperature, found.top_k, found.top_p) == (0, 0, 0.95)
    found = params(client, llm, monkeypatch, "/v1/completions", mirostat=2)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 0, 1)


def test_a_response_repeats_the_values_in_use(client: Client) -> None:
    answer = client.ask("/v1/responses")
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)


def test_ollama_shows_them_as_parameters(client: Client) -> None:
    shown = client.http.post("/api/show", json={"model": "scripted"}).json()["parameters"]
    assert [line.split() for line in shown.splitlines()] == [
        ["temperature", "0.6"], ["top_k", "3"], ["top_p", "0.95"], ["repeat_penalty", "1.05"],
    ]  # fmt: skip


def test_best_of_is_one_text_where_the_model_recommends_temperature_0() -> None:
    with scripted_llm() as llm, served(llm) as client:
        llm.sampling_defaults = {"temperature": 0.0}
        answer = client.ask("/v1/completions", best_of=3, n=1, max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
        sampled = client.ask("/v1/completions", best_of=3, n=1, max_tokens=4, temperature=1.0)
        assert sampled["usage"]["completion_tokens"] == 12


def test_the_log_shows_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Server:
        def run(self) -> None: ...

    monkeypatch.setattr(running, "_server", lambda models, telemetry: Server())
    monkeypatch.setattr(ServedModels, "close", lambda self: None)
    monkeypatch.setattr(running.logs, "write_json_lines", lambda: None)
    monkeypatch.setattr(running.signal, "signal", lambda *given: None)
    with caplog.at_level(logging.INFO, "anydecode"):
        running.serve(llm)
    started = next(record for record in caplog.records if record.getMessage() == "start")
    assert started.fields["sampling"] == OPTIONS  # type: ignore[attr-defined]


def test_the_command_reads_the_file_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anydecode.cli import main
    from anydecode.models.loading import load_checkpoint

    for file in load_checkpoint("tiny-autoregressive").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(OPTIONS))
    found: list[dict[str, float]] = []
    monkeypatch.setattr(
        running, "serve", lambda models: found.append(models.loaded[0].llm.sampling_defaults)
    )
    for more in ((), ("--generation-config", "none")):
        with pytest.raises(SystemExit) as ended:
            main.run(["serve", str(tmp_path), "--port", "0", *more])
        assert not ended.value.code
    assert found == [OPTIONS, {}]
