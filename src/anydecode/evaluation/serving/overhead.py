"""`anydecode bench overhead`: what the server costs beside the engine, per request and per streamed
token, on a model that costs next to nothing."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Annotated, Any

import typer

from anydecode.engine.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.server.logs import JsonLines, log
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

#: A client of its own process, so that its work is not counted: it takes a body and how often to
#: send it, and says how long each answer took and in how many pieces it came. It writes the same
#: bytes each time and reads up to an answer's end: a library for HTTP takes longer than the server
#: may, and that time is nobody's but its own.
CLIENT = """
import json, re, socket, sys, time
port, body, times = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
request = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: 127.0.0.1:%d\\r\\n" % port
request += b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body
link = socket.create_connection(("127.0.0.1", port))
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def ended(said):
    head, blank, rest = said.partition(b"\\r\\n\\r\\n")
    length = re.search(rb"content-length: (\\d+)", head)
    whole = rest.endswith(b"0\\r\\n\\r\\n") if length is None else len(rest) >= int(length[1])
    return blank and whole
found = []
for _ in range(times):
    began = time.perf_counter()
    link.sendall(request)
    said = link.recv(65536)
    while not ended(said):
        said += link.recv(65536)
    found.append((time.perf_counter() - began, said.count(b"data: ")))
    assert said.startswith(b"HTTP/1.1 200"), said
print(json.dumps(found))
"""
_MESSAGES = [{"role": "user", "content": "what does the server add"}]


class _Paced(ScriptedModel):
    """Takes `pause` seconds a pass without the processor, as a model on other cores would; so the
    event loop hears of every token by itself."""

    pause = 0.002

    def run(self, *passed: Any, **named: Any) -> Any:
        sleep(self.pause)
        return super().run(*passed, **named)


@contextmanager
def _logging() -> Iterator[None]:
    """Requests are logged as `anydecode serve` does, to nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(JsonLines())
        before = log.level, log.propagate
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.level, log.propagate = before


def measure(requests: int, tokens: int, rounds: int) -> dict[str, float]:
    """Medians over rounds, in seconds: what a request of one token takes longer by HTTP than in the
    program, of the clock (`request`, and `request_least` in the best round) and of the processor
    (`request_cpu`); the same for each further token of a stream (`token`, `token_cpu`); and how
    many pieces a token came in."""
    found: dict[str, list[float]] = {}
    model = _Paced()
    tokenizer = ByteTokenizer()
    with (
        _logging(),
        LLM(model, tokenizer=tokenizer, cache_positions=4096) as llm,
        LiveServer(llm, Settings(name="scripted", port=0)) as server,
    ):
        port = server.url.rpartition(":")[2]
        for number in range(-1, rounds):
            one = _compared(llm, port, requests, 1, False)
            first, rest = (_compared(llm, port, requests, count, True) for count in (1, tokens))
            if number < 0:  # to warm up
                continue
            each = {
                "request": one["clock"],
                "request_cpu": one["cpu"],
                "token": (rest["clock"] - first["clock"]) / (tokens - 1),
                "token_cpu": (rest["cpu"] - first["cpu"]) / (tokens - 1),
                "pieces": (rest["pieces"] - first["pieces"]) / (tokens - 1),
            }
            for name, value in each.items():
                found.setdefault(name, []).append(value)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return {**middle, "request_least": min(found["request"])}


def _compared(llm: LLM, port: str, times: int, tokens: int, stream: bool) -> dict[str, float]:
    """What an answer costs more by HTTP than in the program, and in how many pieces it came."""
    options: dict[str, Any] = {
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "decoder": "autoregressive",
    }  # fmt: skip
    body = json.dumps({"messages": _MESSAGES, "stream": stream, **options})
    began = process_time()
    told = subprocess.run(
        [sys.executable, "-c", CLIENT, port, body, str(times)], capture_output=True, check=True
    )
    served = (process_time() - began) / times
    answers = json.loads(told.stdout)
    seconds = []
    began = process_time()
    for _ in range(times):
        start = perf_counter()
        llm.chat(_MESSAGES, **options)
        seconds.append(perf_counter() - start)
    alone = (process_time() - began) / times
    return {
        "clock": statistics.median(one[0] for one in answers) - statistics.median(seconds),
        "cpu": served - alone,
        "pieces": statistics.median(one[1] for one in answers),
    }


def bench_overhead(
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many a round.")] = 50,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of a stream.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
) -> None:
    """What the server adds to the engine's own time, per request and per streamed token.

    Example: anydecode bench overhead --rounds 5
    """
    found = measure(requests, tokens, rounds)
    clock, cpu = found["request"] * 1e3, found["request_cpu"] * 1e3
    print(
        f"a request: {clock:.2f} ms more than in the program"
        f" ({found['request_least'] * 1e3:.2f} in the best round), {cpu:.2f} ms of the processor"
    )
    clock, cpu = found["token"] * 1e6, found["token_cpu"] * 1e6
    print(
        f"a streamed token: {clock:.0f} µs more, {cpu:.0f} µs of the processor; "
        f"{found['pieces']:.2f} pieces per token"
    )
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
