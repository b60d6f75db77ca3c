"""The log-probabilities of running requests are bounded by their number."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode import LLM  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, body, served  # noqa: E402


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with served(llm, max_logprobs=1000) as client:
        yield client


@pytest.mark.parametrize(
    "path, fields",
    [
        (COMPLETIONS, {"logprobs": 19, "n": 5, "max_tokens": 11, "temperature": 1}),
        (COMPLETIONS, {"logprobs": 0, "max_tokens": 1001}),
        (COMPLETIONS, {"logprobs": 9, "echo": True, "max_tokens": 0, "prompt": "a" * 101}),
        (COMPLETIONS, {"prompt_logprobs": 9, "prompt": ["a" * 60] * 2}),
        (CHAT, {"logprobs": True, "top_logprobs": 19, "n": 10, "max_tokens": 6}),
        (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 1000, "stream": True}),
        (CHAT, {"prompt_logprobs": 20, "messages": [{"role": "user", "content": "a" * 99}]}),
        (RESPONSES, {"top_logprobs": 20, "max_output_tokens": 100,
                     "include": ["message.output_text.logprobs"]}),
        ("/api/generate", {"logprobs": True, "top_logprobs": 20, "options": {"num_predict": 100}}),
    ],
)  # fmt: skip
def test_more_log_probabilities_than_allowed_are_refused(
    client: Client, path: str, fields: dict[str, Any]
) -> None:
    given = {"prompt": "a"} if path.startswith("/api") else body(path)
    answer = client.http.post(path, json={**given, **fields})
    assert answer.status_code == 400, answer.text
    assert "allowed are 1000 (--max-logprobs)" in answer.text and "\n" not in answer.text


def test_what_is_allowed_is_answered_again_and_again(client: Client) -> None:
    fields = {"logprobs": 19, "n": 5, "max_tokens": 10, "temperature": 1, "ignore_eos": True}
    for stream in (False, True, False):
        answer = client.http.post(
            COMPLETIONS, json=body(COMPLETIONS, **{**fields, "stream": stream})
        )
        assert answer.status_code == 200, answer.text
    client.ask(COMPLETIONS, max_tokens=2000)  # without log-probabilities


@pytest.mark.parametrize("background", [False, True])
def test_running_requests_share_the_number(llm: LLM, background: bool) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
    running: dict[str, Any] = {"max_output_tokens": 600, "decoder": "autoregressive"}
    running |= {"ignore_eos": True, "background": background, "stream": True, **include}
    runner = llm.engine.runners["target"]
    run = runner.run
    with served(llm, max_logprobs=1000) as client:
        another = {"logprobs": 0, "max_tokens": 600}
        try:
            may_run = threading.Event()
            runner.run = lambda plan: (may_run.wait(30), run(plan))[1]  # type: ignore[method-assign]
            with client.http.stream("POST", RESPONSES, json=body(RESPONSES, **running)) as answer:
                lines = answer.iter_lines()
                next(lines)
                refused = client.http.post(COMPLETIONS, json=body(COMPLETIONS, **another))
                assert refused.status_code == 429, refused.text
                assert refused.headers["retry-after"] == "5"
                may_run.set()
                for _ in lines:
                    pass
        finally:
            may_run.set()
            runner.run = run  # type: ignore[method-assign]
        end = time.monotonic() + 30  # the request ends a moment after its last byte was read
        while client.http.post(COMPLETIONS, json=body(COMPLETIONS, **another)).status_code == 429:
            assert time.monotonic() < end
