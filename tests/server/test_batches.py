"""Files and batches: the lines of a batch give the answers of direct requests, bad lines are
reported one by one, and what was not run is run after a restart."""

from __future__ import annotations

import json
import sqlite3
import threading
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

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server.batches.store import BatchStore  # noqa: E402
from anydecode.server.database import Database  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, body, served  # noqa: E402

WAIT = 60
EMBEDDINGS = "/v1/embeddings"
SEEDED: dict[str, Any] = {"seed": 5, "temperature": 0.9}
#: A request that goes on until it is cancelled.
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "decoder": "autoregressive"}


def line(custom_id: str, path: str, request: Any, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": path, "body": request, **fields}


def prompts(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Lines for completions."""
    return [
        line(f"n{number}", COMPLETIONS, body(COMPLETIONS, f"a{number}", **fields))
        for number in range(count)
    ]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Batches:
    """OpenAI's client of a server."""

    def __init__(self, client: Client, key: str = "none") -> None:
        self.http = client.http
        self.openai = openai.OpenAI(
            base_url=f"{client.http.base_url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
        )

    def upload(self, lines: list[Any]) -> Any:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
        content = "\n".join(texts).encode("utf-8", "surrogatepass")
        return self.openai.files.create(file=("in.jsonl", content), purpose="batch")

    def start(self, lines: list[Any], path: str = COMPLETIONS, window: str = "24h") -> Any:
        file = self.upload(lines)
        return self.openai.batches.create(
            input_file_id=file.id,
            endpoint=path,  # type: ignore[arg-type]
            completion_window=window,  # type: ignore[arg-type]
        )

    def get(self, identity: str) -> Any:
        return self.openai.batches.retrieve(identity)

    def until(self, identity: str, condition: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + WAIT
        while not condition(batch := self.get(identity)):
            assert time.monotonic() < end, batch
            time.sleep(0.01)
        return batch

    def end(self, identity: str) -> Any:
        ends = ("completed", "failed", "expired", "cancelled")
        return self.until(identity, lambda batch: batch.status in ends)

    def lines(self, identity: str | None) -> list[dict[str, Any]]:
        if identity is None:
            return []
        text = self.openai.files.content(identity).text
        return [json.loads(one) for one in text.splitlines()]

    def answers(self, batch: Any) -> dict[str, Any]:
        """The bodies of the answers, by custom id."""
        return {
            one["custom_id"]: one["response"]["body"] for one in self.lines(batch.output_file_id)
        }


REQUESTS = {
    COMPLETIONS: [body(COMPLETIONS, text, **SEEDED, n=2, logprobs=2) for text in ("abc", "the")],
    CHAT: [
        body(CHAT, "abc", **SEEDED),
        body(CHAT, "x", seed=1, temperature=0, decoder="prompt-lookup"),
    ],
    RESPONSES: [body(RESPONSES, "abc", **SEEDED), body(RESPONSES, "z", temperature=0)],
    EMBEDDINGS: [{"input": "abc"}, {"input": ["a", "b"], "encoding_format": "base64"}],
}


def generated(answer: dict[str, Any]) -> Any:
    """What an answer has of a text: not its ids and times."""
    if "output" in answer:
        return [answer["status"], [item["content"] for item in answer["output"]]]
    found = answer.get("choices") or answer["data"]
    return [found, answer["usage"]["total_tokens"], answer.get("anydecode", {}).get("seed")]


@pytest.mark.parametrize("path", REQUESTS)
def test_lines_give_the_answers_of_direct_requests(path: str) -> None:
    with scripted_llm() as llm, served(llm) as client:
        batches = Batches(client)
        requests = [*REQUESTS[path], {**REQUESTS[path][0], "model": "scripted"}]
        lines = [line(f"id {number}", path, one) for number, one in enumerate(requests)]
        started = batches.start(lines, path)
        assert (started.status, started.endpoint) == ("validating", path)
        batch = batches.end(started.id)
        assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert list(times) == sorted(times)
        assert batch.expires_at == batch.created_at + 86400
        results = batches.lines(batch.output_file_id)
        assert [one["custom_id"] for one in results] == ["id 0", "id 1", "id 2"]
        for one, request in zip(results, requests, strict=True):
            response = one["response"]
            assert (response["status_code"], one["error"]) == (200, None)
            direct = client.http.post(path, json=request).json()
            assert generated(response["body"]) == generated(direct)
        assert len({one["id"] for one in results}) == 3
        value = client.metrics()[
            f'anydecode_batch_requests_total{{endpoint="{path}",status="200"}}'
        ]
        assert value == 3


def test_files_are_listed_read_and_deleted() -> None:
    with scripted_llm() as llm, served(llm) as client:
        batches = Batches(client)
        content = b'{"a": "\xc3\xa4"}\r\n\n--\r\nnot JSON\n' + bytes(range(256)) * 3000
        files = batches.openai.files
        file = files.create(file=('a "b"\u00e9.jsonl', content), purpose="batch")
        assert (file.bytes, file.purpose, file.object) == (len(content), "batch", "file")
        assert file.filename == 'a "b"\u00e9.jsonl'.replace('"', "%22")
        assert files.retrieve(file.id) == file
        assert files.content(file.id).content == content
        others = [batches.upload(prompts(number)).id for number in (1, 2)]
        assert [one.id for one in files.list()] == [*reversed(others), file.id]
        assert [one.id for one in files.list(order="asc", limit=2)] == [file.id, *others]
        assert [one.id for one in files.list(order="asc", after=others[0])] == others[1:]
        assert [one.id for one in files.list(purpose="batch_output")] == []
        assert files.delete(file.id).deleted
        for use in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                use(file.id)
        with pytest.raises(openai.BadRequestError, match="no such file"):
            files.list(after=file.id)
        short = files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert short.expires_at == short.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="3600 to 2592000"):
            files.create(
                file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
            )
        with pytest.raises(openai.BadRequestError, match="files for batches"):
            files.create(file=b"{}", purpose="fine-tune")


BAD_LINES: list[tuple[Any, str, str]] = [
    ('{"custom_id": "a", ', "invalid_json_line", "not valid JSON"),
    ("[" * 10_000, "invalid_body", "lists and objects"),
    ("\ud800", "invalid_json_line", "not valid JSON"),
    ([1], "invalid_json_line", "must be an object"),
    (line("a1", COMPLETIONS, {}, method="GET"), "invalid_method", "method is 'GET'"),
    (line("a2", CHAT, {}), "invalid_url", "url is '/v1/chat/completions'"),
    ({"method": "POST", "url": COMPLETIONS, "body": {}}, "missing_custom_id", "custom_id"),
    (line("", COMPLETIONS, {}), "missing_custom_id", "custom_id"),
    (line("n0", COMPLETIONS, {"prompt": "x"}), "duplicate_custom_id", "that of line 1"),
    (line("a3", COMPLETIONS, {"prompt": "x", "model": "no"}), "model_not_found", "'no' does not"),
    (line("a4", COMPLETIONS, "text"), "invalid_body", "body must be an object"),
    (line("a5", COMPLETIONS, {"prompt": "x" * 20_000}), "body_too_large", "allowed are 16384"),
    (line("a6", COMPLETIONS, {"prompt": "x", "stream": True}), "unsupported_parameter", "stream"),
    (line("a7", COMPLETIONS, {}, boddy=1), "unknown_parameter", "boddy"),
]


def test_bad_lines_are_reported_and_the_others_run() -> None:
    with scripted_llm() as llm, served(llm, max_body=16384) as client:
        batches = Batches(client)
        good = prompts(2)
        lines = [good[0], *(one for one, _, _ in BAD_LINES), "", good[1], "   "]
        batch = batches.end(batches.start(lines).id)
        counts = batch.request_counts
        assert batch.status == "completed"
        assert (counts.total, counts.completed) == (len(BAD_LINES) + 2, 2)
        assert counts.failed == len(BAD_LINES)
        assert list(batches.answers(batch)) == ["n0", "n1"]
        errors = batches.lines(batch.error_file_id)
        for number, (shown, one, (_, code, part)) in enumerate(
            zip(batch.errors.data, errors, BAD_LINES, strict=True), 2
        ):
            assert (shown.line, shown.code) == (number, code), shown
            assert part in shown.message and "\n" not in shown.message
            assert one["response"] is None and one["error"]["message"] == shown.message
            assert one["error"]["line"] == number
        assert [one["custom_id"] for one in errors if one["custom_id"]] == [
            *("a1", "a2", "n0", "a3", "a4", "a6", "a7")
        ]


@pytest.mark.parametrize("text", ["\\ud800", "\ud800"])
def test_lone_surrogates_in_a_line_leave_the_batch_readable(text: str) -> None:
    with scripted_llm() as llm, served(llm) as client:
        batches = Batches(client)
        request = json.dumps(line("a", COMPLETIONS, {}))[:-1]
        lines = [f'{{"custom_id": "{text}"}}', f'{request}, "{text}": 1}}']
        batch = batches.end(batches.start([*prompts(1), *lines]).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        assert [error.code for error in batch.errors.data] == ["invalid_json_line"] * 2
        assert len(batches.lines(batch.error_file_id)) == 2
        assert [one.id for one in batches.openai.batches.list()] == [batch.id]


def test_refused_requests_are_in_the_error_file() -> None:
    with scripted_llm() as llm, served(llm) as client:
        batches = Batches(client)
        lines = [*prompts(1), line("bad", COMPLETIONS, {"prompt": "a", "max_tokens": "x"})]
        batch = batches.end(batches.start(lines).id)
        assert batch.status == "completed" and batch.errors is None
        assert list(batches.answers(batch)) == ["n0"]
        [error] = batches.lines(batch.error_file_id)
        assert (error["custom_id"], error["error"]) == ("bad", None)
        direct = client.http.post(COMPLETIONS, json=lines[1]["body"])
        response = error["response"]
        assert (response["status_code"], response["body"]) == (400, direct.json())


def test_batches_without_a_line_that_can_run_fail() -> None:
    with scripted_llm() as llm, served(llm) as client:
        batches = Batches(client)
        batch = batches.end(batches.start(["\n"]).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
        assert batch.error_file_id is None and batch.failed_at
        many = batches.end(batches.start(["{"] * 150).id)
        assert (many.status, many.request_counts.failed) == ("failed", 150)
        assert [one.line for one in many.errors.data] == list(range(1, 101))
        assert len(batches.lines(many.error_file_id)) == 150
        create = batches.openai.batches.create
        with pytest.raises(openai.NotFoundError, match="there is no file 'file-x'"):
            create(input_file_id="file-x", endpoint=COMPLETIONS, completion_window="24h")
        assert many.error_file_id is not None
        with pytest.raises(openai.BadRequestError, match="upload one with the purpose batch"):
            create(input_file_id=many.error_file_id, endpoint=CHAT, completion_window="24h")
        for field, value in (("endpoint", "/v1/messages"), ("completion_window", "1 day")):
            fields = {"endpoint": CHAT, "completion_window": "24h", field: value}
            with pytest.raises(openai.BadRequestError, match=field):
                create(input_file_id="file-x", **fields)  # type: ignore[arg-type]


def test_a_running_batch_is_cancelled() -> None:
    with scripted_llm() as llm, served(llm, batch_lines=2) as client:
        batches = Batches(client)
        lines = [*prompts(2), *(line(f"l{n}", COMPLETIONS, {"prompt": "x", **LONG}) for n in "abc")]
        identity = batches.start(lines).id
        running = batches.until(identity, lambda one: one.request_counts.completed == 2)
        assert running.status == "in_progress" and running.output_file_id is None
        with pytest.raises(openai.BadRequestError, match="a batch that has not ended uses"):
            batches.openai.files.delete(running.input_file_id)
        cancelled = batches.openai.batches.cancel(identity)
        assert cancelled.status in ("cancelling", "cancelled") and cancelled.cancelling_at
        batch = batches.end(identity)
        assert batch.status == "cancelled" and batch.cancelled_at
        assert list(batches.answers(batch)) == ["n0", "n1"]
        errors = batches.lines(batch.error_file_id)
        assert [one["custom_id"] for one in errors] == ["la", "lb", "lc"]
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
        until(lambda: not llm.engine.running and not llm.engine.waiting)
        with pytest.raises(openai.BadRequestError, match="has the status cancelled"):
            batches.openai.batches.cancel(identity)
        assert batches.openai.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            batches.openai.batches.cancel("batch_x")


@pytest.mark.slow
def test_a_batch_expires_with_its_window() -> None:
    with scripted_llm() as llm, served(llm, batch_lines=2) as client:
        batches = Batches(client)
        lines = [*prompts(1), line("l", COMPLETIONS, {"prompt": "x", **LONG, "n": 8})]
        started = batches.start(lines, window="4s")
        assert started.expires_at == started.created_at + 4
        batch = batches.end(started.id)
        assert (batch.status, list(batches.answers(batch))) == ("expired", ["n0"])
        [error] = batches.lines(batch.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("l", "batch_expired")
        assert batch.expired_at >= batch.created_at + 4


def test_files_and_batches_of_another_key_do_not_exist() -> None:
    with scripted_llm() as llm, served(llm, api_keys=("one", "two")) as client:
        owner, other = Batches(client, "one"), Batches(client, "two")
        batch = owner.end(owner.start(prompts(1)).id)
        running = owner.start([line("l", COMPLETIONS, {"prompt": "x", **LONG})])
        assert other.openai.files.list().data == [] and other.openai.batches.list().data == []
        files = other.openai.files
        for file in (batch.input_file_id, batch.output_file_id):
            for use in (files.retrieve, files.content, files.delete):
                with pytest.raises(openai.NotFoundError):
                    use(file)
        for identity in (batch.id, running.id):
            for use in (other.openai.batches.retrieve, other.openai.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    use(identity)
        with pytest.raises(openai.NotFoundError):
            other.openai.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert [one.id for one in owner.openai.batches.list()] == [running.id, batch.id]
        owner.openai.batches.cancel(running.id)
        with pytest.raises(openai.AuthenticationError):
            Batches(client).upload([])


def test_batches_are_listed_in_pages() -> None:
    with scripted_llm() as llm, served(llm, batch_lines=1) as client:
        batches = Batches(client)
        metadata = {"a": "b"}
        file = batches.upload(prompts(1)).id
        started = [
            batches.openai.batches.create(
                input_file_id=file, endpoint=COMPLETIONS, completion_window="24h", metadata=metadata
            ).id
            for _ in range(3)
        ]
        listed = batches.openai.batches.list(limit=2)
        assert [one.id for one in listed.data] == started[:0:-1] and listed.has_next_page()
        assert [one.id for one in listed] == started[::-1]  # all pages
        assert batches.end(started[0]).metadata == metadata
        with pytest.raises(openai.BadRequestError, match="no such batch"):
            batches.openai.batches.list(after="batch_x")


def test_the_number_of_batches_is_bounded_per_key() -> None:
    with scripted_llm() as llm, served(llm, api_keys=("one", "two"), max_batches=1) as client:
        owner, other = Batches(client, "one"), Batches(client, "two")
        running = owner.start([line("l", COMPLETIONS, {"prompt": "x", **LONG})])
        with pytest.raises(openai.RateLimitError, match="1 batches have not ended") as caught:
            owner.start(prompts(1))
        assert "retry-after" in caught.value.response.headers
        assert other.end(other.start(prompts(1)).id).status == "completed"
        owner.openai.batches.cancel(running.id)
        owner.end(running.id)
        assert owner.end(owner.start(prompts(1)).id).status == "completed"


def test_lines_leave_room_for_direct_requests() -> None:
    """Lines count as requests, but never take all of their number."""
    with scripted_llm() as llm, served(llm, max_requests=3, batch_lines=9) as client:
        batches = Batches(client)
        lines = [line(f"l{n}", COMPLETIONS, {"prompt": "x", **LONG}) for n in range(4)]
        running = batches.start(lines)
        until(lambda: bool(llm.engine.running))
        for _ in range(3):
            client.ask(CHAT)
        assert len(llm.engine.running) == 1  # of at most half of 3
        batches.openai.batches.cancel(running.id)
        assert batches.end(running.id).status == "cancelled"


def test_keys_take_turns() -> None:
    order: list[str] = []
    with scripted_llm() as llm, served(llm, api_keys=("one", "two"), batch_lines=1) as client:
        first, second = Batches(client, "one"), Batches(client, "two")
        can_run = threading.Event()
        start, runner = llm.start, llm.engine.runners["target"]
        run = runner.run

        def noted_start(request: Any) -> None:
            order.append(bytes(request.prompt).decode())
            start(request)

        def run_later(plan: Any) -> Any:
            can_run.wait(WAIT)
            return run(plan)

        llm.start = noted_start  # type: ignore[method-assign]
        runner.run = run_later  # type: ignore[method-assign]
        lines = [line(name, COMPLETIONS, body(COMPLETIONS, name)) for name in ("c", "d")]
        identities = [first.start(prompts(4)).id]
        until(lambda: bool(order))
        identities.append(second.start(lines).id)
        second.until(identities[1], lambda one: one.status == "in_progress")
        can_run.set()
        first.end(identities[0])
        second.end(identities[1])
    assert order == ["a0", "c", "a1", "d", "a2", "a3"]


@pytest.mark.slow
def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    with scripted_llm() as llm:
        with served(llm, store=path, batch_lines=1, drain_seconds=0.05) as client:
            batches = Batches(client)
            slow = line("slow", COMPLETIONS, {"prompt": "x", **LONG, "max_tokens": 1500})
            lines = [*prompts(3, **SEEDED), "{", slow, *prompts(5, **SEEDED)[3:]]
            identity = batches.start(lines).id
            batches.until(identity, lambda one: one.request_counts.completed == 3)
        with served(llm, store=path) as client:
            batches = Batches(client)
            batch = batches.end(identity)
            assert (batch.status, batch.request_counts.completed) == ("completed", 6)
            assert [one.line for one in batch.errors.data] == [4]
            names = [one["custom_id"] for one in batches.lines(batch.output_file_id)]
            assert names == ["n0", "n1", "n2", "slow", "n3", "n4"]
            # Those that were finished are not run again.
            metric = f'anydecode_batch_requests_total{{endpoint="{COMPLETIONS}",status="200"}}'
            assert client.metrics()[metric] == 3
            for request in (lines[0], lines[5]):
                direct = client.http.post(COMPLETIONS, json=request["body"]).json()
                answer = batches.answers(batch)[request["custom_id"]]
                assert generated(answer) == generated(direct)
        with served(llm, store=path) as client:
            batches = Batches(client)
            assert batches.get(identity) == batch
            assert list(batches.answers(batch)) == names


def test_a_restarted_server_goes_on_with_what_a_killed_one_was_running(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    with scripted_llm() as llm:
        with served(llm, store=str(path), batch_lines=1) as client:
            batches = Batches(client)
            slow = line("slow", COMPLETIONS, {"prompt": "x", **LONG, "max_tokens": 1500})
            identity = batches.start([*prompts(1), slow]).id
            batches.until(identity, lambda one: one.request_counts.completed == 1)
            for end in ("", "-wal"):  # what a kill would leave
                Path(f"{copy}{end}").write_bytes(Path(f"{path}{end}").read_bytes())
            batches.openai.batches.cancel(identity)
            batches.end(identity)
        with served(llm, store=str(copy)) as client:
            batches = Batches(client)
            batch = batches.end(identity)
            assert list(batches.answers(batch)) == ["n0", "slow"]
            metric = f'anydecode_batch_requests_total{{endpoint="{COMPLETIONS}",status="200"}}'
            assert client.metrics()[metric] == 1


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_a_store_with_a_damaged_batch_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "store.db"
    Database(str(path)).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        values = ("b", "", 1, 1e300, 1, 5, text, "", "", "")
        connection.execute(f"INSERT INTO batches VALUES ({', '.join('?' * 10)})", values)
    database = Database(str(path))
    with pytest.raises(InvalidRequestError, match="--store .*; give a file") as caught:
        BatchStore(database, 1 << 20, 60)
    assert "\n" not in str(caught.value)
    database.close()


def test_files_are_bounded() -> None:
    with scripted_llm() as llm, served(llm, file_bytes=30_000, max_file=20_000) as client:
        batches = Batches(client)
        files = batches.openai.files
        with pytest.raises(openai.APIStatusError) as caught:
            batches.upload(["x" * 25_000])
        assert caught.value.status_code == 413
        kept = [batches.upload(["x" * 9000]).id for _ in range(4)]
        assert [one.id for one in files.list(order="asc")] == kept[-2:]  # the oldest are removed
        # Files of a batch that has not ended are kept: what does not fit is refused.
        slow = json.dumps(line("l", COMPLETIONS, {"prompt": "x", **LONG, "n": 8}))
        running = batches.start([slow + " " * 15_000])
        with pytest.raises(openai.APIStatusError, match="files may have 30000 bytes") as full:
            batches.upload(["x" * 15_000])
        assert full.value.status_code == 413
        batches.openai.batches.cancel(running.id)
        assert batches.end(running.id).status == "cancelled"
        batches.upload(["x" * 15_000])


def test_results_that_outgrow_the_store_end_the_batch() -> None:
    with scripted_llm() as llm, served(llm, file_bytes=20_000) as client:
        batches = Batches(client)
        lines = prompts(40, logprobs=5)
        batch = batches.end(batches.start(lines).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_limit")
        assert 0 < len(batches.answers(batch)) < 40


def test_a_server_without_a_store_refuses_files() -> None:
    with scripted_llm() as llm, served(llm, store="none") as client:
        with pytest.raises(openai.BadRequestError, match="--store none"):
            Batches(client).upload(prompts(1))
        for path in ("files", "files/x", "batches", "batches/x"):
            answer = client.http.get(f"/v1/{path}")
            assert answer.status_code == 400 and "stores no files" in answer.text


def test_a_shutdown_waits_for_the_lines_that_run(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    with scripted_llm() as llm:
        with served(llm, store=path, batch_lines=1, drain_seconds=WAIT) as client:
            batches = Batches(client)
            slow = {"prompt": "x", **LONG, "max_tokens": 300}
            identity = batches.start([line(f"l{n}", COMPLETIONS, slow) for n in range(3)]).id
            until(lambda: bool(llm.engine.running))
        with served(llm, store=path) as client:
            batches = Batches(client)
            assert batches.end(identity).request_counts.completed == 3
            metric = f'anydecode_batch_requests_total{{endpoint="{COMPLETIONS}",status="200"}}'
            assert client.metrics()[metric] == 2
