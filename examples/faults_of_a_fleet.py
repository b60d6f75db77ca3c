"""Sends many requests to a fleet while its workers are killed and stopped, and compares every
answer with that of one engine.

python examples/faults_of_a_fleet.py [REQUESTS [KILLS_PER_WORKER [STOPPED_PROCESSES]]]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

from anydecode import LLM
from anydecode.cluster.launcher import MAX_RESTARTS, Launcher, LocalWorkers, places
from anydecode.cluster.proxy import FleetLLM

SECRET = os.urandom(32).hex().encode()
MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
#: One worker computes long prompts, and three generate.
PREFILL, DECODE = 1, 3


def main(num_requests: str = "2000", kills: str = "4", stops: str = "2") -> None:
    if int(kills) > MAX_RESTARTS:
        sys.exit(f"a worker is started again {MAX_RESTARTS} times: give at most so many kills")
    random = Random(0)
    requests = [_request(number, random) for number in range(int(num_requests))]
    with LLM(MODEL, **OPTIONS) as llm:
        expected = [llm.generate(prompt, **options).tokens for prompt, options in requests]
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet, ThreadPoolExecutor(16) as threads:
        address = f"127.0.0.1:{fleet.fleet_port}"
        arguments = [MODEL, "--address", address, "--threads", "1", "--cache-positions", "4096"]
        launcher = Launcher(LocalWorkers(arguments, SECRET))
        wanted = places(None, PREFILL, DECODE)
        launcher.start(wanted)
        faults = [(signal.SIGKILL, one.name) for one in wanted] * int(kills)
        faults += [(signal.SIGSTOP, one.name) for one in random.choices(wanted, k=int(stops))]
        random.shuffle(faults)
        try:
            answers = [threads.submit(fleet.generate, one, **options) for one, options in requests]
            for number, (kind, name) in enumerate(faults, 1):
                _wait_for(answers, number * len(answers) // (len(faults) + 1))
                _strike(fleet, kind, name)
            differing = [
                number
                for number, answer in enumerate(answers)
                if answer.exception() is None and answer.result().tokens != expected[number]
            ]
            failed = [str(one.exception()) for one in answers if one.exception() is not None]
            status = fleet.status()
        finally:
            launcher.close()
    num_kills = len(faults) - int(stops)
    print(f"{len(answers)} requests, {num_kills} kills, {stops} stopped processes")
    print(", ".join(f"{name.replace('_', ' ')} {one}" for name, one in status["counts"].items()))
    print(f"{len(differing)} answers differ, {len(failed)} failed {sorted(set(failed))}")
    print(f"left in the fleet: {status['running']} running, {status['waiting']} waiting")


def _request(number: int, random: Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt of 1 to 200 tokens, and its options."""
    prompt = [random.randrange(97, 123) for _ in range(random.randint(1, 200))]
    options = {"max_tokens": 32, "temperature": 1.0, "ignore_eos": True, "seed": number}
    if number % 4 == 0:
        options["banned_strings"] = ["q"]  # such answers start again, and do not continue
    return prompt, options


def _wait_for(answers: list[Future[Any]], count: int) -> None:
    while sum(one.done() for one in answers) < count:
        time.sleep(0.05)


def _strike(fleet: FleetLLM, kind: signal.Signals, name: str) -> None:
    """Kill a worker as soon as it is there, or stop it until the fleet has given it up."""
    while not (found := [one for one in fleet.status()["workers"] if one["name"] == name]):
        time.sleep(0.05)
    pid, num_lost = found[0]["pid"], fleet.status()["counts"]["lost_workers"]
    os.kill(pid, kind)
    while fleet.status()["counts"]["lost_workers"] == num_lost:
        time.sleep(0.05)
    if kind is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main(*sys.argv[1:])
