"""A fleet of real processes: a worker that dies in the middle of an answer changes no word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from anydecode import LLM
from anydecode.cluster.connection import Connection
from anydecode.cluster.fleet import Fleet
from anydecode.cluster.launcher import Launcher, LocalWorkers, Place
from anydecode.cluster.proxy import FleetLLM
from waiting import wait_for

SECRET = b"a secret of the tests"
MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
ARGUMENTS = ("--threads", "1", "--cache-positions", "4096", "--patience", "1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix"),
]


@contextmanager
def running_fleet(
    *roles: str, ratio: str | None = None, arguments: Sequence[str] = ARGUMENTS
) -> Iterator[FleetLLM]:
    with FleetLLM(MODEL, SECRET, ratio=ratio, **OPTIONS) as fleet:
        address = ["--address", f"127.0.0.1:{fleet.fleet_port}"]
        launcher = Launcher(LocalWorkers([MODEL, *address, *arguments], SECRET))
        launcher.start([Place(f"{role}-{n}", role) for n, role in enumerate(roles)])
        try:
            wait_for(lambda: len(fleet.status()["workers"]) == len(roles))
            yield fleet
        finally:
            launcher.close()


def pid_of(fleet: FleetLLM, name: str) -> int | None:
    """The process of a worker, or None while it is not there."""
    workers: list[dict[str, Any]] = fleet.status()["workers"]
    return next((one["pid"] for one in workers if one["name"] == name), None)


def worker_with_tasks(fleet: FleetLLM) -> dict[str, Any] | None:
    workers: list[dict[str, Any]] = fleet.status()["workers"]
    return next((one for one in workers if one["tasks"]), None)


def has_lost(fleet: FleetLLM, count: int) -> bool:
    return bool(fleet.status()["counts"]["lost_workers"] == count)


def has_restored(fleet: FleetLLM, num_tokens: int) -> bool:
    return bool(fleet.status()["workers"][0]["restored"] == num_tokens)


def signalled(monkeypatch: pytest.MonkeyPatch, sign: int, *lengths: int) -> list[int]:
    """A worker gets a signal when the first of these numbers of an answer's tokens have come, the
    next one at the second number, and so on; frames that they have sent after that are lost.
    Returns the ids of their processes so far."""
    receive, lost, pids = Fleet.receive, set[str](), list[int]()

    def received(fleet: Fleet, incarnation: str, frame: Any, now: float) -> None:
        if incarnation in lost:
            return
        receive(fleet, incarnation, frame, now)
        if frame["type"] != "tokens" or len(pids) == len(lengths):
            return
        member = fleet.members[incarnation]
        longest = max((len(one.generated) for one in member.tasks.values()), default=0)
        if longest >= lengths[len(pids)]:
            assert member.facts.pid is not None
            pids.append(member.facts.pid)
            lost.add(incarnation)
            os.kill(member.facts.pid, sign)

    monkeypatch.setattr(Fleet, "receive", received)
    return pids


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3},
        {"seed": 4, "logprobs": 2, "repetition_penalty": 1.2},
        {"seed": 5, "banned_strings": ["q"]},
    ],
    ids=["continued", "log-probabilities", "started again"],
)
def test_a_killed_worker_changes_no_word(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_tokens": 300, "temperature": 1.0, "ignore_eos": True, **options}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate("a", **options)
    with running_fleet("mixed", "mixed") as fleet:
        killed = signalled(monkeypatch, signal.SIGKILL, 20, 40)
        chunks = list(fleet.stream("a", **options))
        answer = chunks[-1].generation
        assert answer is not None and len(set(killed)) == 2
        assert fleet.status()["counts"]["restarts"] == 2
    assert "".join(map(str, chunks)) == expected.text
    assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize(
    ("ratio", "roles"),
    [
        (None, ("prefill", "decode", "decode")),
        ("xllm", ("prefill", "decode", "decode")),
        ("xllm:policy=cache", ("prefill", "decode", "decode")),
        # No worker is ever within these limits, so roles change as soon as the times are known.
        ("xllm:ttft=1e-6,tpot=1e-6,period=0", ("prefill", "prefill", "decode")),
    ],
)
def test_kills_at_random_times_lose_and_change_nothing(
    ratio: str | None, roles: tuple[str, ...]
) -> None:
    """Prefill and decode workers die while 24 requests run, a third of which may wait."""
    prompts = [[65 + (3 * n + i) % 26 for i in range(40 + 9 * n)] for n in range(24)]
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = [llm.generate(one, seed=n, **options).tokens for n, one in enumerate(prompts)]
    names = [f"{role}-{number}" for number, role in enumerate(roles)]
    with running_fleet(*roles, ratio=ratio) as fleet:
        with ThreadPoolExecutor(6) as threads:
            answers = [
                threads.submit(fleet.generate, one, seed=n, priority=int(n % 3 == 0), **options)
                for n, one in enumerate(prompts)
            ]
            tasks = fleet.driver.fleet.tasks
            for name in (names[1], names[0], names[2], names[1]):
                wait_for(lambda: worker_with_tasks(fleet) or all(one.done() for one in answers))
                # With a fourth worker of one request its answer may be given up, as its cause.
                wait_for(lambda: all(one.num_deaths < 3 for one in list(tasks.values())))
                os.kill(wait_for(partial(pid_of, fleet, name)), signal.SIGKILL)
                time.sleep(0.3)
            found = [answer.result(120).tokens for answer in answers]
        status = fleet.status()
    assert found == expected
    assert status["running"] == status["waiting"] == 0


class KillAt:
    """Ends a worker with `kill -9` when a frame of a type is sent to a worker, or has come from
    one. `transition`: "sent" or "received", the type, and the role of the worker to kill."""

    def __init__(self, fleet: FleetLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transition: tuple[str, str, str] | None = None
        self._members = fleet.driver.fleet.members
        receive, send = Fleet.receive, Connection.send

        def received(of: Fleet, incarnation: str, frame: Any, now: float) -> None:
            self._reach("received", frame["type"])
            receive(of, incarnation, frame, now)

        def sent(connection: Connection, frame: Any, payload: bytes = b"") -> None:
            send(connection, frame, payload)
            self._reach("sent", frame["type"])

        monkeypatch.setattr(Fleet, "receive", received)
        monkeypatch.setattr(Connection, "send", sent)

    def _reach(self, direction: str, frame_type: str) -> None:
        if self.transition is None or self.transition[:2] != (direction, frame_type):
            return
        role, self.transition = self.transition[2], None
        found = [one for one in self._members.values() if one.role == role]
        victim = next((one for one in found if one.tasks), found[0])
        assert victim.facts.pid is not None
        os.kill(victim.facts.pid, signal.SIGKILL)


def test_a_kill_at_any_transition_loses_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt is computed, offered, pulled and continued, one request for each transition."""
    transitions = [
        ("sent", "prefill", "prefill"),
        ("received", "offered", "prefill"),
        ("sent", "run", "prefill"),  # which keeps the blocks that are pulled
        ("sent", "run", "decode"),
        ("received", "tokens", "prefill"),
        ("received", "tokens", "decode"),
        ("received", "ended", "prefill"),
        ("received", "ended", "decode"),
    ]
    prompts = [[65 + (5 * n + i) % 26 for i in range(257)] for n in range(len(transitions))]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = [llm.generate(one, seed=n, **options).tokens for n, one in enumerate(prompts)]
    with running_fleet("prefill", "decode", "decode") as fleet:
        killer = KillAt(fleet, monkeypatch)
        for number, (transition, prompt) in enumerate(zip(transitions, prompts, strict=True)):
            killer.transition = transition
            found = fleet.generate(prompt, seed=number, **options).tokens
            assert (transition, found) == (transition, expected[number])
            wait_for(partial(has_lost, fleet, number + 1))
            wait_for(lambda: len(fleet.status()["workers"]) == 3)
        wait_for(lambda: not any(one["leases"] for one in fleet.status()["workers"]))
        status = fleet.status()
    assert status["running"] == status["waiting"] == 0
    assert all(one["tasks"] == 0 for one in status["workers"])


def test_a_stopped_process_is_given_up_and_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 1,
    }
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate("a", **options).text
    with running_fleet("mixed", "mixed") as fleet:
        stopped = signalled(monkeypatch, signal.SIGSTOP, 20)
        try:
            assert fleet.generate("a", **options).text == expected
            assert fleet.status()["counts"]["lost_workers"] == len(stopped) == 1
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        wait_for(lambda: len(fleet.status()["workers"]) == 2)


def test_stored_prefixes_outlive_a_worker(tmp_path: Path) -> None:
    """It is asked to end, and the next one restores the blocks of its cache."""
    prompt = [65 + number % 26 for number in range(100)]
    arguments = [*ARGUMENTS, "--prefix-spill", str(tmp_path)]
    found = []
    for num_restored in (0, 96):
        with running_fleet("mixed", arguments=arguments) as fleet:
            found.append(fleet.generate(prompt, max_tokens=8, seed=1).tokens)
            wait_for(partial(has_restored, fleet, num_restored))
    assert found[0] == found[1]


def test_the_command_serves_shows_and_drains(tmp_path: Path) -> None:
    environment = {**os.environ, "ANYDECODE_CLUSTER_SECRET": SECRET.decode()}
    anydecode = [sys.executable, "-m", "anydecode", "cluster"]
    up = subprocess.Popen(
        [*anydecode, "up", MODEL, "--workers", "2", "--port", "0", "--fleet-port", "0"]
        + ["--threads", "1", "--cache-positions", "4096", "--prefix-spill", str(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    try:
        lines, urls, fleets = [], [], []
        while len(lines) < 200 and not (
            urls and fleets and sum("joined" in one for one in lines) == 2
        ):
            lines.append(up.stderr.readline())
            assert lines[-1], "".join(lines)
            if not lines[-1].startswith("{"):
                continue
            event = json.loads(lines[-1])
            if "running on" in event["event"]:
                urls.append(event["event"].partition("http://")[2].partition(" ")[0])
            if event["event"] == "fleet":
                fleets.append(event["address"])
        answer = httpx.post(
            f"http://{urls[0]}/v1/completions", json={"prompt": "abc", "max_tokens": 4}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        assert len(list(tmp_path.iterdir())) == 1  # that of the workers' model and build

        def command(*arguments: str) -> str:
            return subprocess.run(
                [*anydecode, *arguments, "--address", fleets[0]],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout

        metrics = httpx.get(f"http://{urls[0]}/metrics").text
        assert "anydecode_fleet_tasks_total 1.0" in metrics
        assert 'anydecode_worker_tasks{worker="mixed-2"} 0.0' in metrics
        shown = command("status")
        assert "mixed-1" in shown and "mixed-2" in shown and "tasks 1" in shown
        assert "gets no new work" in command("drain", "mixed-1")
        wait_for(lambda: "mixed-1" not in command("status"))
        assert [one["name"] for one in json.loads(command("status", "--json"))["workers"]] == [
            "mixed-2"
        ]
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(30)
        up.stderr.close()


def test_the_demo_gives_the_text_of_one_engine(default_model_path: Path, repository: Path) -> None:
    demo = [sys.executable, str(repository / "examples" / "kill_a_worker.py")]
    done = subprocess.run([*demo, str(default_model_path)], capture_output=True, text=True)
    assert "was killed after" in done.stdout, done.stderr
    assert "started again 1 times\nthe text of one engine: True" in done.stdout


def test_many_requests_with_faults_lose_and_change_nothing(repository: Path) -> None:
    tests = repository / "tests"
    environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}{os.pathsep}{tests}"}
    command = [sys.executable, str(tests / "faults_of_a_fleet.py"), "200", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    faults = "200 requests; faults: 1 changed, 2 cut, 2 half-open, 8 kill, 2 stop"
    assert faults in done.stdout, done.stderr
    assert "0 answers differ, 0 failed" in done.stdout and "2 builds" in done.stdout
    assert "left in the fleet: 0 running, 0 waiting, 0 tasks" in done.stdout
    assert "bytes on the full disk: 0" in done.stdout


def test_predicted_latencies_are_compared_with_those_of_a_fleet(
    repository: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 80, "output_length": 4}
    trace.write_text("".join(json.dumps({"timestamp": 100 * n, **line}) + "\n" for n in range(20)))
    command = [sys.executable, str(repository / "examples" / "plan_against_a_fleet.py")]
    command += [str(trace), "--model", "tiny-autoregressive", "--rate", "10", "--requests", "8"]
    command += ["--shorten", "1", "--prefill", "1", "--decode", "1", "--slo", "ttft=60,tpot=60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "prefill-1, decode-1: 8 requests" in done.stdout, done.stderr
    lines = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert lines["within the limits, percent"] == ["100.00", "100.00", "1.000"]
    for name in ("time to first token, P90, ms", "tokens per second"):
        simulated, real, ratio = map(float, lines[name])
        assert simulated > 0 and real > 0 and ratio > 0
