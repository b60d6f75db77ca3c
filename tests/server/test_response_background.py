"""Responses in the background: they outlast their client, can be read again and cancelled, and are
bounded in number."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.responses import store as stores  # noqa: E402
from server_client import CHAT, RESPONSES, Client, events, served  # noqa: E402

WAIT = 60
GREEDY: dict[str, Any] = {"temperature": 0, "decoder": "autoregressive", "ignore_eos": True}
#: A request that goes on until it is cancelled.
LONG: dict[str, Any] = {"background": True, "max_output_tokens": 3000, **GREEDY}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Responses:
    """The responses of a server."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def get(self, identity: str, query: str = "") -> dict[str, Any]:
        answer = self.client.http.get(f"{RESPONSES}/{identity}{query}")
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def start(self, **fields: Any) -> str:
        response = self.client.ask(RESPONSES, **{**LONG, **fields})
        assert (response["status"], response["background"]) == ("queued", True)
        return str(response["id"])

    def end(self, identity: str) -> dict[str, Any]:
        """The response when it has ended."""
        until(lambda: self.get(identity)["status"] not in stores.RUNNING)
        return self.get(identity)

    def cancel(self, identity: str) -> dict[str, Any]:
        answer = self.client.http.post(f"{RESPONSES}/{identity}/cancel")
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def events(self, identity: str, after: int | None = None) -> list[dict[str, Any]]:
        query = "" if after is None else f"&starting_after={after}"
        answer = self.client.http.get(f"{RESPONSES}/{identity}?stream=true{query}")
        assert answer.status_code == 200, answer.text
        return list(events(answer.text.splitlines()))


def is_idle(llm: LLM) -> bool:
    return not llm.engine.running and not llm.engine.waiting


def test_a_response_is_generated_without_a_client() -> None:
    with scripted_llm() as llm, served(llm) as client:
        responses = Responses(client)
        plain = client.ask(RESPONSES, **GREEDY, max_output_tokens=20)
        identity = responses.start(max_output_tokens=20, metadata={"a": "b"}, trace=True)
        ended = responses.end(identity)
        assert ended["status"] == "incomplete" and ended["metadata"] == {"a": "b"}
        assert "trace" not in ended["anydecode"]
        assert ended["output"][0]["content"] == plain["output"][0]["content"]
        counts = [response["usage"]["output_tokens"] for response in (ended, plain)]
        assert counts == [20, 20]
        # Its events can be read again, from any number on.
        found = responses.events(identity)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        kinds = [event["type"].removeprefix("response.") for event in found]
        assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "incomplete"
        assert found[-1]["response"] == ended
        assert responses.events(identity, 4) == found[5:]
        assert responses.events(identity, len(found)) == []
        follow = client.ask(RESPONSES, "on", previous_response_id=identity)
        assert follow["previous_response_id"] == identity
        assert client.metrics()["anydecode_generation_tokens_total"] == 20 + 20 + 3


def test_a_stream_goes_on_after_its_client_has_gone() -> None:
    fields = {**LONG, "input": "abc", "stream": True, "max_output_tokens": 60}
    with scripted_llm() as llm, served(llm) as client:
        responses = Responses(client)
        first: list[dict[str, Any]] = []
        with client.http.stream("POST", RESPONSES, json=fields) as answer:
            with closing(events(answer.iter_lines())) as lines:
                for event in lines:
                    first.append(event)
                    if len(first) == 7:
                        break
        identity = first[0]["response"]["id"]
        rest = responses.events(identity, 6)
        assert [event["sequence_number"] for event in rest] == list(range(7, 7 + len(rest)))
        ended = responses.end(identity)
        assert rest[-1]["response"] == ended and ended["status"] == "incomplete"
        deltas = [one["delta"] for one in [*first, *rest] if one["type"].endswith("text.delta")]
        assert "".join(deltas) == ended["output"][0]["content"][0]["text"]


def test_running_responses_are_cancelled() -> None:
    with scripted_llm() as llm, served(llm) as client:
        responses = Responses(client)
        identity = responses.start()
        until(lambda: bool(responses.get(identity)["output"]))
        running = responses.get(identity)
        assert running["status"] == "in_progress" and running["usage"] is None
        error = client.refused(RESPONSES, previous_response_id=identity)
        assert "has not ended yet" in error["message"]
        assert responses.cancel(identity)["status"] == "cancelled"
        until(lambda: is_idle(llm))
        cancelled = responses.get(identity)
        assert cancelled["output"][0]["status"] == "incomplete"
        last = responses.events(identity)[-1]
        assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
        assert responses.cancel(identity) == cancelled  # as it was
        ended = responses.end(responses.start(max_output_tokens=2))
        assert responses.cancel(ended["id"]) == ended
        # Deleting cancels too.
        identity = responses.start()
        assert client.http.delete(f"{RESPONSES}/{identity}").json()["deleted"]
        assert client.http.get(f"{RESPONSES}/{identity}").status_code == 404
        until(lambda: is_idle(llm))
        plain = client.ask(RESPONSES)
        answer = client.http.post(f"{RESPONSES}/{plain['id']}/cancel")
        assert answer.status_code == 400
        assert "only responses created with background" in answer.json()["error"]["message"]
        assert client.http.post(f"{RESPONSES}/resp_x/cancel").status_code == 404


def test_readers_of_a_cancelled_response_get_its_end() -> None:
    with scripted_llm() as llm, served(llm) as client:
        responses = Responses(client)
        identity = responses.start()
        with client.http.stream("GET", f"{RESPONSES}/{identity}?stream=true") as answer:
            with closing(events(answer.iter_lines())) as lines:
                assert next(lines)["type"] == "response.created"
                with httpx.Client(base_url=client.http.base_url, trust_env=False) as other:
                    other.post(f"{RESPONSES}/{identity}/cancel")
                *_, last = lines
        assert last["response"]["status"] == "cancelled"


def test_a_running_response_of_another_key_does_not_exist() -> None:
    with scripted_llm() as llm, served(llm, api_keys=("one", "two")) as client:
        owner = {"authorization": "Bearer one"}
        other = {"authorization": "Bearer two"}
        body = {"input": "a", **LONG}
        path = f"{RESPONSES}/{client.http.post(RESPONSES, json=body, headers=owner).json()['id']}"
        for method, end in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            answer = client.http.request(method, f"{path}{end}", headers=other)
            assert answer.status_code == 404
        assert client.http.get(path, headers=owner).json()["status"] in stores.RUNNING
        assert client.http.get(f"{path}/input_items", headers=owner).status_code == 200
        assert client.http.post(f"{path}/cancel", headers=owner).status_code == 200


def test_the_number_of_responses_in_the_background_is_bounded() -> None:
    with scripted_llm() as llm:
        with served(llm, max_background=2, max_requests=3) as client:
            responses = Responses(client)
            running = [responses.start(), responses.start()]
            answer = client.http.post(RESPONSES, json={"input": "a", **LONG})
            assert answer.status_code == 429 and "retry-after" in answer.headers
            assert "2 responses are running in the background" in answer.json()["error"]["message"]
            client.ask(CHAT)  # a third request
            responses.cancel(running[0])
            responses.cancel(responses.start())
            responses.cancel(running[1])
        # Those in the background count as requests; cancelling one needs no room.
        with served(llm, max_background=2, max_requests=1) as client:
            responses = Responses(client)
            identity = responses.start()
            answer = client.http.post(CHAT, json={"messages": []})
            assert answer.status_code == 429 and "retry-after" in answer.headers
            assert responses.cancel(identity)["status"] == "cancelled"
            client.ask(CHAT)


def test_a_shutdown_fails_what_runs_too_long(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    with scripted_llm() as llm:
        with served(llm, store=path, drain_seconds=0.05) as client:
            identity = Responses(client).start()
        until(lambda: is_idle(llm))
        with served(llm, store=path) as client:
            failed = Responses(client).get(identity)
            assert (failed["status"], failed["error"]) == ("failed", stores.INTERRUPTED)
            last = Responses(client).events(identity)[-1]
            assert (last["type"], last["response"]) == ("response.failed", failed)
        with served(llm, store=path, drain_seconds=WAIT) as client:
            identity = Responses(client).start(max_output_tokens=30)
        with served(llm, store=path) as client:
            assert Responses(client).get(identity)["status"] == "incomplete"


def test_a_restarted_server_fails_what_a_killed_one_was_generating(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    copy = tmp_path / "copy.db"
    with scripted_llm() as llm:
        with served(llm, store=str(path)) as client:
            responses = Responses(client)
            identity = responses.start()
            until(lambda: responses.get(identity)["status"] == "in_progress")
            for end in ("", "-wal"):  # what a kill would leave
                Path(f"{copy}{end}").write_bytes(Path(f"{path}{end}").read_bytes())
            responses.cancel(identity)
        with served(llm, store=str(copy)) as client:
            responses = Responses(client)
            failed = responses.get(identity)
            assert (failed["status"], failed["error"]) == ("failed", stores.INTERRUPTED)
            [event] = responses.events(identity, 6)
            assert (event["type"], event["sequence_number"]) == ("response.failed", 7)
            assert event["response"] == failed


def test_an_error_of_the_run_is_stored(monkeypatch: Any) -> None:
    from anydecode.errors import InvalidRequestError
    from anydecode.server.chat_run import ChatRun

    async def stream(self: ChatRun) -> Any:
        yield 0, [("content", "a")], False
        raise InvalidRequestError("this cannot be")

    monkeypatch.setattr(ChatRun, "stream", stream)
    with scripted_llm() as llm, served(llm) as client:
        responses = Responses(client)
        failed = responses.end(responses.start())
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": "server_error", "message": "this cannot be"}
        kinds = [event["type"] for event in responses.events(failed["id"])]
        assert kinds[-2:] == ["error", "response.failed"]
        streamed = client.chunks(RESPONSES)
        assert [event["type"] for event in streamed[-2:]] == kinds[-2:]
        assert streamed[-2]["message"] == "this cannot be"
        kept = responses.get(streamed[0]["response"]["id"])
        assert kept["status"] == "failed"


def test_what_outgrows_the_store_fails() -> None:
    with scripted_llm() as llm:
        with served(llm, store_bytes=4096) as client:
            responses = Responses(client)
            ended = responses.end(responses.start(max_output_tokens=300))
            assert ended["status"] == "failed" and ended["output"] == []
            assert "could not be stored" in ended["error"]["message"]
            error = client.refused(RESPONSES, **LONG, instructions="x" * 3500)
            assert "cannot be stored" in error["message"] and error["param"] == "background"
            until(lambda: is_idle(llm))
