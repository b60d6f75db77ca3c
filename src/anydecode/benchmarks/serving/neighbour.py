"""`anydecode bench neighbour`: the time between the tokens of one client, alone and while another
client attacks the server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.serving.attacks import ATTACKS, HOSTILE_TEMPLATE
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.models.opening import open_model
from anydecode.models.tokenizers import HFTokenizer
from anydecode.report import JsonFile, write_report
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

#: Largest p99 under an attack, in multiples of that without one.
MAX_RATIO = 3.0
#: A client in its own process, whose times are not those of the server's interpreter: it streams
#: answers, and prints the seconds between their events.
_CLIENT = """
import json, socket, sys, time
port, body, times = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
gaps = []
for _ in range(times):
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(b"POST /v1/completions HTTP/1.1\\r\\n"
                 b"host: 127.0.0.1:%d\\r\\nconnection: close\\r\\n"
                 b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"
                 % (port, len(body)) + body)
    last, first = None, link.recv(65536)
    assert first.startswith(b"HTTP/1.1 200"), first
    while data := link.recv(65536):
        now = time.perf_counter()
        assert b"error" not in data, data
        if data.count(b'"text":'):
            if last is not None:
                gaps.append(now - last)
            last = now
    link.close()
print(json.dumps(gaps))
"""


@dataclass
class Neighbour:
    """What a client observes.

    Attributes:
        attack: What runs beside it; "" for nothing.
        gaps: Number of times between events.
        p50: Median of these times, in seconds.
        p99: 99th percentile of these times, in seconds.
        longest: The longest of these times, in seconds.
        statuses: Answers of the attack by status; 0 for a closed connection.
    """

    attack: str
    gaps: int
    p50: float
    p99: float
    longest: float
    statuses: dict[str, int]


def measure(
    model: Any, tokens: int, requests: int, attacks: list[str], threads: int | None = None
) -> list[Neighbour]:
    """Measure a client alone, beside each attack, and alone again; the first result is that of both
    times alone.

    Args:
        model: The model of the server.
        tokens: Tokens per answer.
        requests: Number of answers per measurement, one after the other.
        attacks: Names in `ATTACKS`.
        threads: Threads of the model.
    """
    opened, tokenizer = open_model(model, threads=threads)
    if not isinstance(tokenizer, HFTokenizer):
        raise InvalidRequestError("this benchmark needs a model with a tokenizer.json")
    hostile = HFTokenizer(
        tokenizer.backend,
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
        templates=HOSTILE_TEMPLATE,
    )
    body = json.dumps({
        "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "decoder": "autoregressive", "stream": True,
    })  # fmt: skip
    with (
        LLM(opened, tokenizer=hostile) as llm,
        LiveServer(llm, Settings(name="attacked", port=0)) as server,
    ):
        host, port = server.url.removeprefix("http://").split(":")

        def gaps() -> list[float]:
            command = [sys.executable, "-c", _CLIENT, port, body, str(requests)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found: list[float] = json.loads(done.stdout)
            return found

        gaps()  # a warm-up
        quiet, results = gaps(), []
        for name in attacks:
            attacker = subprocess.Popen(
                [sys.executable, "-m", "anydecode.benchmarks.serving.attacks", host, port, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it has started
            try:
                during = gaps()
                output, _ = attacker.communicate()
            finally:
                attacker.kill()
            results.append(_summary(name, during, json.loads(output)))
        quiet += gaps()
        if llm.driver.error is not None:
            raise llm.driver.error
    return [_summary("", quiet, {}), *results]


def _summary(name: str, gaps: list[float], statuses: dict[str, int]) -> Neighbour:
    p50, p99 = np.percentile(gaps, [50, 99])
    return Neighbour(name, len(gaps), float(p50), float(p99), max(gaps), statuses)


def bench_neighbour(
    model: Annotated[str, typer.Option("--model", "-m", help="The model.")] = (
        "smollm2-135m-instruct"
    ),
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per answer.")] = 128,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Answers per measurement.")
    ] = 4,
    attack: Annotated[
        list[str] | None,
        typer.Option("--attack", help=f"One of {', '.join(ATTACKS)}; all by default."),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads.")] = None,
    json_file: JsonFile = None,
) -> int:
    """Measure the time between a client's tokens while another client attacks the server.

    Example: anydecode bench neighbour --attack "long constants"
    """
    names = list(attack or ATTACKS)
    if unknown := [name for name in names if name not in ATTACKS]:
        raise InvalidRequestError(f"--attack is {unknown[0]!r}; allowed are {', '.join(ATTACKS)}")
    results = measure(model, tokens, requests, names, threads)
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "model": model,
        "results": [asdict(one) for one in results],
    }
    write_report(report, json_file, lambda: print_report(results))
    quiet, *rest = results
    return 1 if any(one.p99 > MAX_RATIO * quiet.p99 for one in rest) else 0


def print_report(results: list[Neighbour]) -> None:
    """Print the times alone and beside each attack, with the ratio of the p99."""
    quiet = results[0]
    print(f"{cpu_name()}, {usable_cores()} cores")
    for one in results:
        statuses = ", ".join(f"{number} x {status}" for status, number in one.statuses.items())
        print(
            f"{one.attack or 'alone':22} p50 {one.p50 * 1e3:6.1f} ms, p99 {one.p99 * 1e3:6.1f} ms"
            + (f" ({one.p99 / quiet.p99:.1f} x)" if one.attack else "")
            + f", longest {one.longest * 1e3:6.1f} ms"
            + (f"; answers: {statuses}" if one.attack else "")
        )
