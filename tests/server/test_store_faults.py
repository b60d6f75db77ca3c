"""A store whose disk is full, and batches that are cancelled, deleted or left in the middle:
nothing is lost, half written or left behind."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.batches import runner  # noqa: E402
from anydecode.server.batches.store import BatchStore  # noqa: E402
from anydecode.server.database import Database, StoreError  # noqa: E402
from server_client import COMPLETIONS, RESPONSES, body, served  # noqa: E402

WAIT = 60
#: Fields of a response that needs pages of its own in the database.
LARGE: dict[str, Any] = {"metadata": {f"key{number}": "x" * 500 for number in range(16)}}
ENDS = ("completed", "failed", "expired", "cancelled")


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return result


def requests(count: int, path: str = COMPLETIONS) -> bytes:
    """The lines of a batch."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"n{number}",
                "method": "POST",
                "url": path,
                "body": body(path, f"a{number}", seed=number),
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def upload(http: Any, content: bytes) -> Any:
    return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})


def start(http: Any, content: bytes) -> str:
    """Upload a file and start its batch. Returns the id of the batch."""
    file = upload(http, content).json()["id"]
    return str(create(http, file).json()["id"])


def create(http: Any, file: str) -> Any:
    fields = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "1h"}
    return http.post("/v1/batches", json=fields)


def batch(http: Any, identity: str) -> dict[str, Any]:
    answer = http.get(f"/v1/batches/{identity}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def end(http: Any, identity: str) -> dict[str, Any]:
    """The batch when it has ended."""

    def ended() -> dict[str, Any] | None:
        found = batch(http, identity)
        return found if found["status"] in ENDS else None

    found: dict[str, Any] = until(ended)
    return found


def results(http: Any, found: dict[str, Any]) -> list[str]:
    """The custom ids of all lines that have a result."""
    names: list[str] = []
    for file in (found["output_file_id"], found["error_file_id"]):
        if file is not None:
            text = http.get(f"/v1/files/{file}/content").text
            names += [json.loads(line)["custom_id"] for line in text.splitlines()]
    return sorted(names)


class Disk:
    """What a database can be written to: `fill` lets writes fail as SQLite reports a full disk.
    The limit is set on the thread that uses the connection: if another thread uses it too, Python
    may miss an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_full = False
        connect, disk = sqlite3.connect, self

        class Limited(sqlite3.Connection):
            is_full = False

            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                if self.is_full != disk._is_full:
                    self.is_full = disk._is_full
                    [size] = super().execute("PRAGMA page_count").fetchone()
                    limit = size if self.is_full else 1_000_000
                    super().execute(f"PRAGMA max_page_count = {limit}")
                return super().execute(*arguments)

        monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Limited))
        monkeypatch.setattr(runner, "STORE_SECONDS", 0.01)

    def fill(self) -> None:
        self._is_full = True

    def empty(self) -> None:
        self._is_full = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def assert_full(answer: Any) -> None:
    assert answer.status_code == 507, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "storage_failed")
    assert "database or disk is full" in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("is_file", [False, True])
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    disk: Disk, tmp_path: Path, is_file: bool, caplog: Any
) -> None:
    store = str(tmp_path / "db") if is_file else "memory"
    with scripted_llm() as llm, served(llm, store=store) as client:
        http = client.http
        kept = upload(http, b"{}\n").json()["id"]
        disk.fill()
        assert_full(upload(http, b"x" * 100_000))
        assert_full(http.post(RESPONSES, json=body(RESPONSES, **LARGE, background=True)))
        assert "the store failed: database or disk is full" in caplog.text
        assert [file["id"] for file in http.get("/v1/files").json()["data"]] == [kept]
        for stream in (False, True):  # answers need no store
            response = client.last(RESPONSES, stream, **LARGE)
            assert (response["status"], response["store"]) == ("incomplete", False)
        assert client.ask(COMPLETIONS)["usage"]["completion_tokens"] == 3
        disk.empty()
        assert upload(http, b"x" * 100_000).status_code == 200
        assert client.ask(RESPONSES)["store"] is True
        until(lambda: not llm.engine.running)
    if is_file:
        with closing(sqlite3.connect(store)) as connection:
            [count] = connection.execute("SELECT COUNT(*) FROM responses").fetchone()
            assert count == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
async def test_what_a_disk_did_not_take_gives_its_room_back(tmp_path: Path) -> None:
    """Writes beyond the size that the system allows for a file fail as on a disk."""
    import resource

    database = Database(str(tmp_path / "db"))
    store = BatchStore(database, 64 << 20, 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StoreError, match="disk I/O error"):
            await store.put_file(None, "a", [b"x" * 1000] * 20_000, None)
        assert (tmp_path / "db-wal").stat().st_size == 0
        file = await store.put_file(None, "b", [b"x"], None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    page = await store.files(None, None, 10, order="desc", purpose=None)
    assert page == ([file], False)
    database.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("method", ["start", "add"])
def test_a_batch_waits_for_a_full_disk_and_loses_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, method: str, is_cancelled: bool, caplog: Any
) -> None:
    gate = Gate(monkeypatch, method, is_after=False)
    with scripted_llm() as llm, served(llm, batch_lines=1) as client:
        http, content = client.http, requests(3) + b" " * 20_000
        identity = start(http, content)
        gate.reached.wait(WAIT)
        disk.fill()
        gate.open.set()
        until(lambda: "the store failed" in caplog.text)
        assert batch(http, identity)["status"] not in ENDS
        assert client.ask(COMPLETIONS)["usage"]["completion_tokens"] == 3
        if is_cancelled:
            assert http.post(f"/v1/batches/{identity}/cancel").status_code == 200
        disk.empty()
        found = end(http, identity)
        assert found["status"] == ("cancelled" if is_cancelled else "completed")
        assert results(http, found) == ["n0", "n1", "n2"]


class Gate:
    """Holds the first call of a method of the store, before or after it has done its work, until
    `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, *, is_after: bool) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        original = getattr(BatchStore, method)

        async def hold() -> None:
            if not self.reached.is_set():
                self.reached.set()
                while not self.open.is_set():
                    await asyncio.sleep(0.005)

        async def held(store: BatchStore, *arguments: Any, **options: Any) -> Any:
            if not is_after:
                await hold()
            result = await original(store, *arguments, **options)
            if is_after:
                await hold()
            return result

        monkeypatch.setattr(BatchStore, method, held)


METHODS = ("lines", "start", "progress", "add", "finish")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_cancelled_or_completed_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, method: str, is_after: bool
) -> None:
    gate = Gate(monkeypatch, method, is_after=is_after)
    with scripted_llm() as llm, served(llm, batch_lines=1) as client:
        http = client.http
        identity = start(http, requests(3))
        gate.reached.wait(WAIT)
        is_late = method == "finish"
        answer = http.post(f"/v1/batches/{identity}/cancel")
        if is_late and is_after:
            assert answer.status_code == 400 and "completed" in answer.text
        else:
            assert answer.status_code == 200
        gate.open.set()
        found = end(http, identity)
        assert found["status"] == ("completed" if is_late else "cancelled")
        assert results(http, found) == ["n0", "n1", "n2"]
        assert sum(found["request_counts"].values()) == 6  # total, and completed or failed
        until(lambda: not llm.engine.running and not llm.engine.waiting)
        assert http.delete(f"/v1/files/{found['input_file_id']}").status_code == 200


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_file_of_a_batch_stays_wherever_the_batch_is(
    monkeypatch: pytest.MonkeyPatch, method: str, is_after: bool
) -> None:
    gate = Gate(monkeypatch, method, is_after=is_after)
    with scripted_llm() as llm, served(llm, batch_lines=1) as client:
        http = client.http
        file = upload(http, requests(3)).json()["id"]
        identity = create(http, file).json()["id"]
        gate.reached.wait(WAIT)
        status = http.delete(f"/v1/files/{file}").status_code
        assert status == (200 if method == "finish" and is_after else 400)
        gate.open.set()
        found = end(http, identity)
        assert found["status"] == "completed"
        assert results(http, found) == ["n0", "n1", "n2"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_stops_wherever_a_batch_is_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, is_after: bool
) -> None:
    gate, store = Gate(monkeypatch, method, is_after=is_after), str(tmp_path / "db")
    with scripted_llm() as llm:
        with served(llm, store=store, batch_lines=1, drain_seconds=0.01) as client:
            identity = start(client.http, requests(3))
            gate.reached.wait(WAIT)
        gate.open.set()
        with served(llm, store=store) as client:
            found = end(client.http, identity)
            assert found["status"] == "completed"
            assert results(client.http, found) == ["n0", "n1", "n2"]
            assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


def test_a_file_that_is_deleted_while_its_batch_is_created_is_a_404(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch, "put_batch", is_after=False)
    with scripted_llm() as llm, served(llm) as client, ThreadPoolExecutor() as threads:
        file = upload(client.http, requests(1)).json()["id"]
        creation = threads.submit(create, client.http, file)
        gate.reached.wait(WAIT)
        assert client.http.delete(f"/v1/files/{file}").status_code == 200
        gate.open.set()
        assert creation.result().status_code == 404
        assert client.http.get("/v1/batches").json()["data"] == []


def test_batches_that_are_created_at_once_do_not_pass_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch, "put_batch", is_after=False)
    with scripted_llm() as llm, served(llm, max_batches=1) as client:
        with ThreadPoolExecutor() as threads:
            file = upload(client.http, requests(1)).json()["id"]
            held = threads.submit(create, client.http, file)
            gate.reached.wait(WAIT)
            end_gate = Gate(monkeypatch, "finish", is_after=False)
            assert create(client.http, file).status_code == 200
            gate.open.set()
            assert held.result().status_code == 429
            end_gate.open.set()
