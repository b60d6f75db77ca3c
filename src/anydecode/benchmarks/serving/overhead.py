"""`anydecode bench overhead`: the server's overhead over the engine, per request and per streamed
token, on a model whose own cost is negligible."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, process_time, sleep
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.report import JsonFile, write_report
from anydecode.server.logs import JsonLines, log
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

#: A client that runs in its own process, so that its work is not counted. It sends a body a number
#: of times, and prints how long each response took and in how many events it came. It uses a plain
#: socket, because the time of an HTTP library would exceed that of the server.
CLIENT = """
import json, re, socket, sys, time
port, body, times = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
request = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: 127.0.0.1:%d\\r\\n" % port
request += b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body
link = socket.create_connection(("127.0.0.1", port))
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def is_complete(response):
    head, blank, rest = response.partition(b"\\r\\n\\r\\n")
    length = re.search(rb"content-length: (\\d+)", head)
    complete = rest.endswith(b"0\\r\\n\\r\\n") if length is None else len(rest) >= int(length[1])
    return blank and complete
results = []
for _ in range(times):
    start = time.perf_counter()
    link.sendall(request)
    response = link.recv(65536)
    while not is_complete(response):
        response += link.recv(65536)
    results.append((time.perf_counter() - start, response.count(b"data: ")))
    assert response.startswith(b"HTTP/1.1 200"), response
print(json.dumps(results))
"""
_MESSAGES = [{"role": "user", "content": "what does the server add"}]


class _PacedModel(ScriptedModel):
    """A model whose passes take `pause` seconds without using the CPU, like a model on an
    accelerator, so that the event loop handles every token separately."""

    pause = 0.002

    def run(self, *args: Any, **options: Any) -> Any:
        sleep(self.pause)
        return super().run(*args, **options)


@contextmanager
def _logging() -> Iterator[None]:
    """Log requests as `anydecode serve` does, but to the null device."""
    with open(os.devnull, "w", encoding="utf-8") as null_device:
        handler = logging.StreamHandler(null_device)
        handler.setFormatter(JsonLines())
        previous = log.level, log.propagate
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.level, log.propagate = previous


def measure(requests: int, tokens: int, rounds: int) -> dict[str, float]:
    """Measure the overhead of HTTP over calls in the same process.

    Args:
        requests: Requests per round.
        tokens: Tokens per streamed request.
        rounds: Rounds after a warm-up.

    Returns:
        Medians over rounds: extra wall time and CPU time, in seconds, of a request for one token
        (`request`, `request_cpu`) and of each further token of a stream (`token`, `token_cpu`);
        events per token (`pieces`); and the minimum of `request` over rounds (`request_least`).
    """
    results: dict[str, list[float]] = {}
    model = _PacedModel()
    tokenizer = ByteTokenizer()
    with (
        _logging(),
        LLM(model, tokenizer=tokenizer, cache_positions=4096) as llm,
        LiveServer(llm, Settings(name="scripted", port=0)) as server,
    ):
        port = server.url.rpartition(":")[2]
        for number in range(-1, rounds):
            one = _overhead(llm, port, requests, 1, False)
            first, rest = (_overhead(llm, port, requests, count, True) for count in (1, tokens))
            if number < 0:  # warm-up
                continue
            each = {
                "request": one["clock"],
                "request_cpu": one["cpu"],
                "token": (rest["clock"] - first["clock"]) / (tokens - 1),
                "token_cpu": (rest["cpu"] - first["cpu"]) / (tokens - 1),
                "pieces": (rest["pieces"] - first["pieces"]) / (tokens - 1),
            }
            for name, value in each.items():
                results.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in results.items()}
    return {**medians, "request_least": min(results["request"])}


def _overhead(llm: LLM, port: str, times: int, tokens: int, stream: bool) -> dict[str, float]:
    """Extra wall and CPU time of a request over HTTP, in seconds, and its number of events."""
    options: dict[str, Any] = {
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "decoder": "autoregressive",
    }  # fmt: skip
    body = json.dumps({"messages": _MESSAGES, "stream": stream, **options})
    cpu_start = process_time()
    client = subprocess.run(
        [sys.executable, "-c", CLIENT, port, body, str(times)], capture_output=True, check=True
    )
    served = (process_time() - cpu_start) / times
    answers = json.loads(client.stdout)
    seconds = []
    cpu_start = process_time()
    for _ in range(times):
        start = perf_counter()
        llm.chat(_MESSAGES, **options)
        seconds.append(perf_counter() - start)
    direct = (process_time() - cpu_start) / times
    return {
        "clock": statistics.median(one[0] for one in answers) - statistics.median(seconds),
        "cpu": served - direct,
        "pieces": statistics.median(one[1] for one in answers),
    }


def bench_overhead(
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests per round.")] = 50,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per stream.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the server's overhead over the engine, per request and per streamed token.

    Example: anydecode bench overhead --rounds 5
    """
    results = measure(requests, tokens, rounds)
    write_report(results, json_file, lambda: print_report(results))


def print_report(results: dict[str, float]) -> None:
    """Print the overhead per request and per token."""
    clock, cpu = results["request"] * 1e3, results["request_cpu"] * 1e3
    print(
        f"per request: {clock:.2f} ms of overhead"
        f" ({results['request_least'] * 1e3:.2f} in the best round), {cpu:.2f} ms of CPU time"
    )
    clock, cpu = results["token"] * 1e6, results["token_cpu"] * 1e6
    print(
        f"per streamed token: {clock:.0f} µs of overhead, {cpu:.0f} µs of CPU time; "
        f"{results['pieces']:.2f} events per token"
    )
