"""A client of a server that runs on a thread of the test process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.server.run import ServerRun
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FILL_IN = "/v1/fim/completions"


def body(path: str, input_text: str = "abc", **fields: Any) -> dict[str, Any]:
    """A request for three tokens. Its seed is fixed: with one chosen at random, some answers would
    end before."""
    if "random_seed" not in fields:
        fields = {"seed": 0, **fields}
    if path in (COMPLETIONS, FILL_IN):
        return {"prompt": input_text, "max_tokens": 3, **fields}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": input_text}], "max_tokens": 3, **fields}
    return {"input": input_text, "max_output_tokens": 3, **fields}


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The data of the events of a stream."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


class Client:
    """A client of a server on a thread of this process."""

    def __init__(self, http: Any) -> None:
        self.http = http

    def ask(self, path: str, *input_text: str, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body(path, *input_text, **fields))
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def refused(self, path: str, *input_text: str, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body(path, *input_text, **fields))
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    def chunks(self, path: str, *input_text: str, **fields: Any) -> list[dict[str, Any]]:
        answer = self.http.post(path, json=body(path, *input_text, **fields, stream=True))
        assert answer.status_code == 200, answer.text
        return list(events(answer.text.splitlines()))

    def single_chunks(self, llm: LLM, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream whose tokens arrive one by one: the target runs a pass only after
        the server has sent the tokens of the one before it."""
        runner = llm.engine.runners["target"]
        run, notify, wait = runner.run, Request.notify, ServerRun.wait_for_progress
        all_sent = threading.Event()
        all_sent.set()

        def run_when_sent(plan: Any) -> Any:
            all_sent.wait(timeout=10)
            return run(plan)

        def notify_unsent(request: Request, callback: Callable[[], Any]) -> None:
            def on_progress() -> None:
                all_sent.clear()
                callback()

            notify(request, on_progress)

        async def wait_for_progress(server_run: ServerRun) -> None:
            all_sent.set()
            await wait(server_run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "run", run_when_sent)
            patch.setattr(Request, "notify", notify_unsent)
            patch.setattr(ServerRun, "wait_for_progress", wait_for_progress)
            with self.http.stream("POST", path, json=body(path, **fields, stream=True)) as answer:
                return list(events(answer.iter_lines()))

    def metrics(self) -> dict[str, float]:
        """The values of `/metrics` by name."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def last(self, path: str, stream: bool, *input_text: str, **fields: Any) -> dict[str, Any]:
        """The response, or the last chunk of a stream."""
        if not stream:
            return self.ask(path, *input_text, **fields)
        chunk = self.chunks(path, *input_text, **fields)[-1]
        response: dict[str, Any] = chunk.get("response", chunk)
        return response


@contextmanager
def served(llm: LLM, **settings: Any) -> Iterator[Client]:
    """A client of a server of `llm`; `settings` are those of the server."""
    with LiveServer(llm, Settings(name="scripted", port=0, **settings)) as server:
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as http:
            yield Client(http)
