"""Sends many requests to a fleet under faults, and compares every answer with that of one engine.

PYTHONPATH=src:tests python tests/faults_of_a_fleet.py [REQUESTS [ROUNDS]]

Six processes work: four workers that are killed with `kill -9` at each transition of a request,
stopped, and cut off by their links; one whose log and blocks find the disk full; and one of another
build, whose answers are compared with those of an engine of that build. Each round has every fault
of `FAULTS` once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from random import Random
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from anydecode import LLM
from anydecode.cluster import launcher as launcher_module
from anydecode.cluster.launcher import Launcher, Place
from anydecode.cluster.message import plain_logprobs
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.secret import VARIABLE
from anydecode.cluster.worker import WorkerOptions, work
from anydecode.kernels.build import local_variants
from faulty_link import Fault, FaultyLink, changed, lost, truncated
from waiting import wait_for

SECRET = os.urandom(32).hex()
MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
FULL_DISK, OTHER_BUILD = "full-disk", "other-build"
WORKERS = [
    Place("prefill-1", "prefill"),
    *(Place(f"decode-{number}", "decode") for number in (1, 2, 3)),
    Place(FULL_DISK, "decode"),
    Place(OTHER_BUILD, "mixed"),
]
#: The kernels of the other build: not the fastest ones of this machine.
OTHER_VARIANT = {"ANYDECODE_VARIANT": (*local_variants(), "scalar")[1]}


@dataclass(frozen=True)
class Strike:
    """A fault of one worker.

    Attributes:
        worker: Its name.
        kind: "kill", "stop", "half-open", "cut" or "changed".
        frame: The frame with which it begins, of `FRAMES`.
        link: The worker on whose link that frame passes; empty: the same.
    """

    worker: str
    kind: str
    frame: str
    link: str = ""


#: What a frame has in it, and whether it goes to a worker. "pull": a task whose blocks are pulled.
FRAMES = {
    "prefill": (b'"type":"prefill"', True),
    "run": (b'"type":"run"', True),
    "pull": (b'"source":{', True),
    "offered": (b'"type":"offered"', False),
    "tokens": (b'"type":"tokens"', False),
    "ended": (b'"type":"ended"', False),
}
FAULTS = [
    Strike("prefill-1", "kill", "prefill"),
    Strike("prefill-1", "kill", "offered"),
    Strike("prefill-1", "kill", "pull", "decode-1"),  # which pulls its blocks
    Strike("decode-1", "kill", "run"),
    Strike("decode-2", "kill", "tokens"),
    Strike("decode-3", "kill", "ended"),
    Strike(FULL_DISK, "kill", "tokens"),
    Strike(OTHER_BUILD, "kill", "tokens"),
    Strike("prefill-1", "stop", "pull", "decode-2"),
    Strike("decode-3", "stop", "tokens"),
    Strike("prefill-1", "half-open", "offered"),
    Strike("decode-1", "half-open", "run"),
    Strike("decode-2", "cut", "run"),
    Strike("decode-3", "cut", "tokens"),
    Strike("decode-1", "changed", "tokens"),
]
_FAULTS_OF_LINKS: dict[str, Fault] = {"half-open": lost, "cut": truncated, "changed": changed}


def main(num_requests: str = "2000", rounds: str = "2") -> None:
    launcher_module.MAX_RESTARTS = 1000
    every = range(int(num_requests))
    expected = answers_alone(every)
    strikes = FAULTS * int(rounds)
    Random(0).shuffle(strikes)
    with (
        TemporaryDirectory() as folder,
        FleetLLM(MODEL, SECRET.encode(), **OPTIONS) as fleet,
        ThreadPoolExecutor(16) as threads,
    ):
        links = {one.name: FaultyLink(fleet.fleet_port) for one in WORKERS}
        launcher = Launcher(lambda place: start_worker(place, links[place.name].port, folder))
        launcher.start(WORKERS)
        try:
            wait_for(lambda: len(fleet.status()["workers"]) == len(WORKERS))
            answers: list[Future[str]] = []
            left = iter(requests(len(every)))

            def send(number: int | None) -> bool:
                """Send so many further requests, or all. Returns whether there was one."""
                sent = [
                    threads.submit(answer_of_fleet, fleet, prompt, options)
                    for prompt, options in islice(left, number)
                ]
                answers.extend(sent)
                return bool(sent)

            def send_more() -> bool:
                return not all(one.done() for one in answers) or send(
                    len(every) // (len(strikes) + 1)
                )

            for one in strikes:
                strike(fleet, links, one, send_more)
            send(None)
            wait(answers)
            failed = [str(one.exception()) for one in answers if one.exception() is not None]
            found = {n: one.result() for n, one in enumerate(answers) if one.exception() is None}
            wait_for(lambda: not any(one["leases"] for one in fleet.status()["workers"]))
            wait_for(lambda: len(fleet.status()["workers"]) == len(WORKERS))
            passes = {one["name"]: one["passes"] for one in fleet.status()["workers"]}
            status = fleet.status()
            num_written = sum(
                os.path.getsize(os.path.join(path, file))
                for path, _, files in os.walk(folder)
                for file in files
            )
        finally:
            launcher.close()
            for link in links.values():
                link.close()
    others = [number for number, answer in found.items() if answer != expected[number]]
    of_other_build = answers_of_another_build(others)
    differing = [n for n, answer in zip(others, of_other_build, strict=True) if found[n] != answer]
    kinds = [one.kind for one in strikes]
    numbers = ", ".join(f"{kinds.count(one)} {one}" for one in sorted(set(kinds)))
    print(f"{len(answers)} requests; faults: {numbers}")
    print(", ".join(f"{name.replace('_', ' ')} {one}" for name, one in status["counts"].items()))
    num_groups = len({one["group"] for one in status["workers"]})
    print(
        f"{num_groups} builds; {len(others) - len(differing)} answers are those of the other only"
    )
    print(f"passes since the last start: {passes}; bytes on the full disk: {num_written}")
    print(f"{len(differing)} answers differ, {len(failed)} failed {sorted(set(failed))}")
    tasks = sum(one["tasks"] for one in status["workers"])
    print(
        f"left in the fleet: {status['running']} running, {status['waiting']} waiting,"
        f" {tasks} tasks of workers"
    )


def requests(number: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 200 tokens, and their options."""
    random = Random(0)
    found = []
    for seed in range(number):
        prompt = [random.randrange(97, 123) for _ in range(random.randint(1, 200))]
        options = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "seed": seed}
        options["logprobs"] = 1
        if seed % 4 == 0:
            options["banned_strings"] = ["q"]  # such answers start again, and do not continue
        found.append((prompt, options))
    return found


def answers_alone(numbers: Sequence[int]) -> list[str]:
    """The answers of one engine to these requests: tokens, log-probabilities and text."""
    every = requests(1 + max(numbers, default=0))
    with LLM(MODEL, **OPTIONS) as llm:
        generations = (llm.generate(every[n][0], **every[n][1]) for n in numbers)
        return [_plain(one, one.text) for one in generations]


def answers_of_another_build(numbers: Sequence[int]) -> list[str]:
    """`answers_alone` of a process with other kernels."""
    done = subprocess.run(
        [sys.executable, __file__, "alone"],
        env={**os.environ, **OTHER_VARIANT},
        input=json.dumps(numbers),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def answer_of_fleet(fleet: FleetLLM, prompt: list[int], options: dict[str, Any]) -> str:
    """An answer with the text as it was streamed, piece by piece."""
    chunks = list(fleet.stream(prompt, **options))
    [generation] = [one.generation for one in chunks if one.generation is not None]
    return _plain(generation, "".join(chunk.text for chunk in chunks))


def _plain(generation: Any, text: str) -> str:
    return json.dumps([generation.tokens, plain_logprobs(generation.logprobs), text])


def start_worker(place: Place, port: int, folder: str) -> subprocess.Popen[bytes]:
    """Start a worker as a process; that with a full disk keeps its blocks in `folder`."""
    command = [sys.executable, "-m", "anydecode", "cluster", "worker", MODEL]
    command += ["--address", f"127.0.0.1:{port}", "--threads", "1", "--cache-positions", "4096"]
    command += ["--name", place.name, "--role", place.role]
    environment, log = {**os.environ, VARIABLE: SECRET}, "/dev/null"
    if place.name == OTHER_BUILD:
        environment.update(OTHER_VARIANT)
    if place.name == FULL_DISK:
        command = [sys.executable, __file__, "worker", place.role, str(port), folder]
        log = "/dev/full"
    with open(log, "w") as stream:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=stream, stdout=stream
        )


def work_on_a_full_disk(role: str, port: str, folder: str) -> None:
    """Be a worker that stores evicted blocks in files, and can write to no file."""
    from anydecode.server.logs import write_json_lines

    write_json_lines()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    engine = {**OPTIONS, "prefix_spill": folder}
    work(
        WorkerOptions(MODEL, "127.0.0.1", int(port), engine, name=FULL_DISK, role=role),
        os.environ[VARIABLE].encode(),
    )


class Trigger:
    """A fault that begins with a frame: then `act` is called, and `fault` begins."""

    def __init__(self, mark: bytes, act: Callable[[], None], fault: Fault | None) -> None:
        self.begun = Event()
        self._mark, self._act, self._fault = mark, act, fault

    def __call__(self, data: bytes) -> tuple[bytes, bool]:
        if not self.begun.is_set() and self._mark in data:
            self._act()
            self.begun.set()
        if self._fault is None or not self.begun.is_set():
            return data, True
        return self._fault(data)


def strike(
    fleet: FleetLLM, links: dict[str, FaultyLink], one: Strike, send_more: Callable[[], bool]
) -> None:
    """Cause a fault, and wait until the fleet has lost the worker. `send_more` sends further
    requests when all have their answers, and returns whether there is any without."""

    def found() -> Any:
        return next((w for w in fleet.status()["workers"] if w["name"] == one.worker), None)

    pid, num_lost = wait_for(found)["pid"], fleet.status()["counts"]["lost_workers"]
    sign = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(one.kind)
    link = links[one.link or one.worker]

    def begin() -> None:
        if sign is not None:
            os.kill(pid, sign)
        elif one.kind == "half-open":
            link.to_target = link.from_target = lost

    mark, goes_to_worker = FRAMES[one.frame]
    trigger = Trigger(mark, begin, _FAULTS_OF_LINKS.get(one.kind))
    if goes_to_worker:
        link.from_target = trigger
    else:
        link.to_target = trigger
    while not trigger.begun.wait(0.05):
        if not send_more():
            raise SystemExit(f"no frame for {one}: give more requests")
    wait_for(lambda: fleet.status()["counts"]["lost_workers"] > num_lost)
    if one.kind == "stop":
        os.kill(pid, signal.SIGCONT)
    if one.kind == "half-open":
        link.repair()
    link.to_target = link.from_target = None


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work_on_a_full_disk(*sys.argv[2:])
    elif sys.argv[1:2] == ["alone"]:
        print(json.dumps(answers_alone(json.load(sys.stdin))))
    else:
        main(*sys.argv[1:])
