"""Faults of links, disks and workers: every request ends once, with the text of one engine, and the
fleet's log has one line that says what happened."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from anydecode import LLM
from anydecode.cluster import fleet as fleet_module
from anydecode.cluster import worker as worker_module
from anydecode.cluster.connection import Connection
from anydecode.cluster.fleet import MIN_BLOCKS, Fleet
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.worker import Worker
from anydecode.errors import FleetError
from anydecode.kernels.library import load_library
from anydecode.memory import spill as spill_module
from anydecode.memory.prefix import BLOCK
from faulty_link import Fault, FaultyLink, changed, lost, truncated
from waiting import wait_for
from worker_threads import SECRET, start_worker

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 8192}
#: Answers that are slow enough to be hit in the middle.
SLOW: dict[str, Any] = {
    "max_tokens": 700,
    "temperature": 1.0,
    "top_p": 0.99,
    "logprobs": 5,
    "ignore_eos": True,
}
LONG_PROMPT = [65 + number % 26 for number in range(4 * BLOCK * MIN_BLOCKS + 1)]


@contextmanager
def worker_thread(port: int, **options: Any) -> Iterator[Worker]:
    """A worker on a thread, until its fleet has ended."""
    llm = LLM(MODEL, **{**OPTIONS, **options.pop("engine", {})})
    worker, thread = start_worker(llm, port, **options)
    yield worker
    thread.join(30)


def lines(caplog: pytest.LogCaptureFixture, *events: str) -> list[dict[str, Any]]:
    """The fields of the log's lines about these events."""
    return [
        record.fields
        for record in caplog.records
        if record.getMessage() in events  # type: ignore[attr-defined]
    ]


def tasks_of(fleet: FleetLLM, name: str) -> int:
    return sum(one["tasks"] for one in fleet.status()["workers"] if one["name"] == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to_proxy", "to_worker", "reason"),
    [
        (lost, lost, "is silent for"),
        (lost, None, "is silent for"),
        (None, lost, "has ended"),
        (truncated, None, "has ended"),
        (None, truncated, "has ended"),
        (changed, None, "was changed on its way"),
    ],
    ids=[
        "half-open",
        "nothing from the worker",
        "nothing to the worker",
        "cut from the worker",
        "cut to the worker",
        "changed",
    ],
)
def test_a_broken_link_changes_no_word(
    to_proxy: Fault | None,
    to_worker: Fault | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_module, "DEAD_SECONDS", 5.0)
    # Of a link that is silent both ways, the proxy notices it first.
    monkeypatch.setattr(worker_module, "DEAD_SECONDS", 20.0 if "silent" in reason else 5.0)
    caplog.set_level(logging.INFO, "anydecode.server")
    with LLM(MODEL, **OPTIONS) as llm:
        expected = [llm.generate("a", seed=seed, **SLOW) for seed in range(4)]
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet, ThreadPoolExecutor(4) as threads:
        link = FaultyLink(fleet.fleet_port)
        with (
            worker_thread(link.port, name="behind"),
            worker_thread(fleet.fleet_port, name="direct"),
        ):
            wait_for(lambda: len(fleet.status()["workers"]) == 2)
            streams = [
                threads.submit(lambda seed: list(fleet.stream("a", seed=seed, **SLOW)), seed)
                for seed in range(4)
            ]
            wait_for(lambda: tasks_of(fleet, "behind"))
            link.to_target, link.from_target = to_proxy, to_worker
            found = [stream.result(120) for stream in streams]
            wait_for(lambda: fleet.status()["counts"]["lost_workers"])
            status = fleet.status()
            link.close()
            fleet.close()
    for chunks, one in zip(found, expected, strict=True):
        assert "".join(chunk.text for chunk in chunks) == one.text
        answer = chunks[-1].generation
        assert answer is not None and (answer.tokens, answer.logprobs) == (one.tokens, one.logprobs)
        assert sum(chunk.generation is not None for chunk in chunks) == 1
    assert status["running"] == status["waiting"] == 0
    [line] = lines(caplog, "worker_left", "worker_given_up")[:1]
    assert line["worker"] == "behind" and reason in line["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lost, "did not come within 2 s"),
        (truncated, "has ended"),
        (changed, "was changed on its way"),
    ],
    ids=["half-open", "cut", "changed"],
)
def test_a_broken_handover_changes_no_word(
    fault: Fault, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "PULL_SECONDS", 2.0)
    caplog.set_level(logging.INFO, "anydecode.server")
    links: list[FaultyLink] = []
    join_frame = Worker.join_frame

    def behind_a_link(worker: Worker, incarnation: str, address: tuple[str, int]) -> Any:
        links.append(FaultyLink(address[1]))
        links[-1].from_target = _AfterHandshake(fault)
        return join_frame(worker, incarnation, (address[0], links[-1].port))

    monkeypatch.setattr(Worker, "join_frame", behind_a_link)
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with (
            worker_thread(fleet.fleet_port, name="p", role="prefill"),
            worker_thread(fleet.fleet_port, name="d", role="decode"),
        ):
            wait_for(lambda: len(fleet.status()["workers"]) == 2)
            assert fleet.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens == expected
            counts = fleet.status()["counts"]
            wait_for(lambda: not any(one["leases"] for one in fleet.status()["workers"]))
            fleet.close()
    for link in links:
        link.close()
    assert counts["handovers"] == 1 and counts["restarts"] == counts["lost_workers"] == 0
    [line] = lines(caplog, "handover_failed")
    assert reason in line["reason"]


class _AfterHandshake:
    """A fault of all but the first bytes, with which the two sides get to know each other."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._num_seen = fault, 0

    def __call__(self, data: bytes) -> tuple[bytes, bool]:
        self._num_seen += len(data)
        return (data, True) if self._num_seen <= 100 else self._fault(data)


@pytest.mark.parametrize(
    "options",
    [{"ignore_eos": True}, {"stop": ["e", "o"]}, {"temperature": 1.0, "logprobs": 2}],
    ids=["max_tokens", "stop string", "log-probabilities"],
)
def test_an_answer_whose_end_is_lost_has_its_text(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens have come: nothing is left to continue."""
    receive, lost_ends = Fleet.receive, list[Any]()

    def received(fleet: Fleet, incarnation: str, frame: Any, now: float) -> None:
        if frame["type"] == "ended" and not lost_ends:
            lost_ends.append(frame)
        else:
            receive(fleet, incarnation, frame, now)

    options = {"max_tokens": 20, "seed": 1, **options}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate("a", **options)
    monkeypatch.setattr(Fleet, "receive", received)
    monkeypatch.setattr(worker_module, "BEAT_SECONDS", 0.05)
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet, worker_thread(fleet.fleet_port):
        wait_for(lambda: fleet.status()["workers"])
        found = fleet.generate("a", **options)
        counts = fleet.status()["counts"]
        fleet.close()
    assert lost_ends and counts["restarts"] == 1
    assert (found.text, found.tokens, found.finish_reason, found.logprobs) == (
        expected.text, expected.tokens, expected.finish_reason, expected.logprobs
    )  # fmt: skip


def test_a_full_disk_under_the_blocks_of_a_worker_changes_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens
    num_refused = 0

    def full(*arguments: object, **options: object) -> None:
        nonlocal num_refused
        num_refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with (
            worker_thread(fleet.fleet_port, name="p", role="prefill"),
            worker_thread(
                fleet.fleet_port,
                name="d",
                role="decode",
                engine={"prefix_spill": tmp_path},
            ),
        ):
            wait_for(lambda: len(fleet.status()["workers"]) == 2)
            with monkeypatch.context() as patch:
                patch.setattr(spill_module.os, "open", full)
                assert fleet.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens == expected
                wait_for(lambda: num_refused)
            counts = fleet.status()["counts"]
            fleet.close()
    assert counts["handovers"] == 1 and counts["restarts"] == 0


def test_a_worker_of_another_build_gets_no_blocks_and_gives_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens
    library = load_library()
    if library is None:
        pytest.skip("needs the native kernels")
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        monkeypatch.setattr(library, "build", "that of another compiler")
        with worker_thread(fleet.fleet_port, name="p", role="prefill"):
            monkeypatch.undo()
            with worker_thread(fleet.fleet_port, name="d", role="decode"):
                wait_for(lambda: len(fleet.status()["workers"]) == 2)
                assert fleet.generate(LONG_PROMPT, max_tokens=20, seed=1).tokens == expected
                status = fleet.status()
                fleet.close()
    assert status["counts"]["handovers"] == 0
    assert len({one["group"] for one in status["workers"]}) == 2


def test_a_worker_with_another_secret_is_refused_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "anydecode.server")
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with worker_thread(fleet.fleet_port, name="right"):
            wait_for(lambda: fleet.status()["workers"])
            with LLM(MODEL, **OPTIONS) as llm:
                expected = llm.generate("a", max_tokens=5).tokens
                stranger = Worker(llm, b"the secret of another fleet", patience=0)
                with pytest.raises(FleetError, match="secret"):
                    asyncio.run(stranger.run("127.0.0.1", fleet.fleet_port))
            assert fleet.generate("a", max_tokens=5).tokens == expected
            assert [one["name"] for one in fleet.status()["workers"]] == ["right"]
            fleet.close()
    [line] = lines(caplog, "fleet_connection_refused")
    assert "secret" in line["reason"]


def test_a_worker_that_sends_something_else_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frames: list[Any] = [{"type": "beat"}, {"type": "tokens"}, {"type": "unheard of"}, [1], "text"]
    monkeypatch.setattr(worker_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "_RETRY_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "anydecode.server")
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate("a", max_tokens=5).tokens
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with worker_thread(fleet.fleet_port, name="odd"):
            wait_for(lambda: fleet.status()["workers"])
            for count, frame in enumerate(frames, 1):
                with monkeypatch.context() as patch:
                    patch.setattr(Connection, "receive", _receives(frame))
                    wait_for(lambda n=count: fleet.status()["counts"]["lost_workers"] == n)
                assert fleet.generate("a", max_tokens=5).tokens == expected  # it has joined again
            fleet.close()
    found = lines(caplog, "worker_left")[: len(frames)]
    assert len(found) == len(frames)
    for line in found:
        assert line["worker"] == "odd" and "no frame of a worker" in line["reason"]


def _receives(frame: Any) -> Any:
    receive = Connection.receive

    async def instead(connection: Any) -> Any:
        found, payload = await receive(connection)
        return (frame if found["type"] == "beat" else found), payload

    return instead


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_fleet_serves_although_its_log_cannot_be_written() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        ports = [str(each.getsockname()[1]) for each in (one, two)]
    with open("/dev/full", "w") as full:
        up = subprocess.Popen(
            [sys.executable, "-m", "anydecode", "cluster", "up", MODEL, "--workers", "1"]
            + ["--port", ports[0], "--fleet-port", ports[1]]
            + ["--threads", "1", "--cache-positions", "4096"],
            env={**os.environ, "ANYDECODE_CLUSTER_SECRET": SECRET.decode()},
            stderr=full,
        )

    def answered() -> bool:
        body = {"prompt": "abc", "max_tokens": 4}
        try:
            url = f"http://127.0.0.1:{ports[0]}/v1/completions"
            return httpx.post(url, json=body, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answered)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(30)
