"""`anydecode bench soak`: thousands of requests by reliable and unreliable clients against a server
on a tiny model. Checks that no resource leaks and that every answer is correct."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import struct
import sys
from collections import Counter
from collections.abc import Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.serving.attacks import ATTACKS, Address
from anydecode.certification.tiny import tiny_llm
from anydecode.constraints.byte_cache import cached_bytes
from anydecode.errors import InvalidRequestError
from anydecode.memory.spill import DiskSpill
from anydecode.report import JsonFile, write_report
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
from anydecode.server.workers import worker_pool

#: Relative frequency of each kind of client.
KINDS = {
    "whole": 30, "stream": 30, "leave": 10, "cancel": 8, "bad": 8, "reset": 6, "cut": 4, "slow": 4,
}  # fmt: skip
DECODERS = ("autoregressive", "prompt-lookup", "suffix", "auto", "token-recycling")
INVALID_BODIES = (
    b"{", b"\xff\xfe", b"[]", b"[" * 3000, b'{"prompt": 7}', b'{"prompt": ""}',
    b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "decoder": "nonsense"}', b'{"prompt": "a", "nonsense": 1}',
    b'{"prompt": [99999]}', b'{"prompt": "a", "resume": {}}', b'{"prompt": "\\ud800"}',
)  # fmt: skip
#: Largest growth of the process, in bytes, that is still attributed to the allocator.
MAX_GROWTH = 24 << 20
#: Maximum memory of what decoders learn from earlier answers, in bytes: small, so that it is
#: reached early.
MAX_LEARNED_BYTES = 16 << 20
#: Seconds between two kills of a worker process, and between two attacks.
KILL_SECONDS, ATTACK_SECONDS = 3.0, 1.0
#: Statuses that an attack may have: 0 for a closed connection, never a server error. 503 only if
#: worker processes are killed, for a job whose second process is killed too.
ALLOWED_STATUSES = frozenset((0, 200, 400, 408, 413, 429, 431))


@dataclass
class Case:
    """A request body, and the texts expected for it."""

    body: dict[str, Any]
    texts: list[str]


@dataclass
class Soak:
    """Results of a soak test.

    Attributes:
        requests: Number of requests.
        kinds: Number of requests by kind of client.
        compared: Number of answers compared with the expected ones.
        wrong: Descriptions of all failures.
        memory: Resident bytes, sampled about twenty times over the run.
        bounded: Bytes that caches and decoders kept at the same times. They have upper limits.
        learned: Bytes that the decoders report to have learned, at the end.
        killed: Number of worker processes that were killed.
        attacks: Number of answers to attacks by name and status.
        failed_writes: Number of blocks of the spill that could not be written.
        preemptions: Number of preemptions.
        slots_left: Cache positions still in use at the end.
        files_left: Files and sockets still open at the end.
        seconds: Duration of the run.
    """

    requests: int
    kinds: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    bounded: list[int] = field(default_factory=list)
    learned: int = 0
    killed: int = 0
    attacks: Counter[str] = field(default_factory=Counter)
    failed_writes: int = 0
    preemptions: int = 0
    slots_left: int = 0
    files_left: int = 0
    seconds: float = 0.0

    def check_memory(self) -> None:
        """Add a failure if memory grew from the first half to the last quarter of the samples, by
        more than what is kept within limits."""
        quarter = max(1, len(self.memory) // 4)
        early, late = max(self.memory[: 2 * quarter]), max(self.memory[-quarter:])
        filled = max(self.bounded[-quarter:]) - max(self.bounded[: 2 * quarter])
        if late > early + MAX_GROWTH + max(0, filled):
            self.wrong.append(
                f"memory grew from {early >> 20} to {late >> 20} MiB, and what has limits by"
                f" {max(0, filled) >> 20} MiB"
            )


def cases(count: int, generator: random.Random, alone: LLM) -> list[Case]:
    """Random requests, with the texts of plain decoding of one request at a time on `alone`."""
    result = []
    for _ in range(count):
        body: dict[str, Any] = {
            "prompt": "".join(generator.choices("abcdef ", k=generator.randrange(1, 180))),
            "max_tokens": generator.randrange(1, 33),
            "seed": generator.randrange(1 << 30),
            "temperature": generator.choice([0.0, 0.8, 1.0]),
            "n": generator.choice([1, 1, 1, 2, 3]),
        }
        if generator.random() < 0.3:
            body["prompt"] = ("shared beginning " * 8 + body["prompt"])[:180]
        if body["temperature"] == 0:
            body["n"] = 1
        answer = alone.generate(body["prompt"], **{k: v for k, v in body.items() if k != "prompt"})
        result.append(Case(body, [sample.text for sample in answer.samples]))
    return result


class Clients:
    """Sends `cases` to a server at `host:port`, each by a client of a random kind."""

    def __init__(self, host: str, port: int, cases: list[Case], seed: int, timeout: float) -> None:
        self.host, self.port, self.cases, self.timeout = host, port, cases, timeout
        self.generator = random.Random(seed)
        #: Draws the kinds alone, so that a run has the same ones whatever the order of events.
        self.kinds = random.Random(seed)

    async def run(self, soak: Soak, at_once: int, sample_memory: Any) -> None:
        """Send all requests of `soak`, `at_once` concurrently; call `sample_memory` about twenty
        times."""
        numbers = iter(range(soak.requests))
        interval = max(1, soak.requests // 20)

        async def worker() -> None:
            for number in numbers:
                if number % interval == 0:
                    sample_memory()
                kind = self.kinds.choices(list(KINDS), list(KINDS.values()))[0]
                soak.kinds[kind] += 1
                try:
                    await asyncio.wait_for(self._one(kind, soak), self.timeout)
                except asyncio.TimeoutError:
                    soak.wrong.append(f"{kind}: no answer within {self.timeout:g} s")
                except Exception as error:  # any failure of a client is recorded
                    soak.wrong.append(f"{kind}: {type(error).__name__}: {error}")

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def _one(self, kind: str, soak: Soak) -> None:
        case = self.generator.choice(self.cases)
        body = {**case.body, "decoder": self.generator.choice(DECODERS)}
        if kind == "bad":
            status, answer = await self._post(self.generator.choice(INVALID_BODIES))
            if status != 400 or "error" not in answer:
                soak.wrong.append(f"bad: status {status}")
            return
        if kind in ("reset", "cut"):
            await self._disconnect(json.dumps(body).encode(), kind == "cut")
            return
        if kind == "cancel":
            task = asyncio.ensure_future(self._post(json.dumps(body).encode()))
            await asyncio.sleep(self.generator.random() * 0.05)
            task.cancel()
            await asyncio.wait([task])
            return
        if kind == "whole":
            status, answer = await self._post(json.dumps(body).encode())
            texts = [choice["text"] for choice in answer.get("choices", ())]
        else:
            max_events = self.generator.randrange(1, 5) if kind == "leave" else None
            status, streamed = await self._stream(body, max_events, slow=kind == "slow")
            if streamed is None:
                return
            texts = streamed
        soak.compared += 1
        if status != 200 or texts != case.texts:
            soak.wrong.append(
                f"{kind}: status {status}, {texts} instead of {case.texts} for {body}"
            )

    async def _open(self, body: bytes, content_length: int | None = None) -> Any:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {content_length or len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    async def _post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        reader, writer = await self._open(body)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            answer = json.loads(await reader.read())
        finally:
            writer.close()
        return int(head.split()[1]), answer

    async def _stream(
        self, body: dict[str, Any], max_events: int | None, slow: bool
    ) -> tuple[int, list[str] | None]:
        """Status and texts; None instead of the texts if the client left after `max_events`
        events."""
        reader, writer = await self._open(json.dumps({**body, "stream": True}).encode())
        texts = [""] * body["n"]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            while line := await reader.readline():
                if slow:
                    await asyncio.sleep(0.01)
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    texts[choice["index"]] += choice["text"]
                if max_events is not None and (max_events := max_events - 1) == 0:
                    return 200, None
        finally:
            writer.close()
        return int(head.split()[1]), texts

    async def _disconnect(self, body: bytes, early: bool) -> None:
        """Reset the connection: within the request body if `early`, else during the response."""
        part = body[: len(body) // 2] if early else body
        _, writer = await self._open(part, len(body))
        await asyncio.sleep(self.generator.random() * 0.03)
        linger = struct.pack("ii", 1, 0)  # close with a reset
        writer.get_extra_info("socket").setsockopt(1, 13, linger)
        writer.close()


async def _kill_workers(result: Soak) -> None:
    """Kill a random worker process again and again. Its job runs again in another."""
    generator = random.Random(0)
    while True:
        await asyncio.sleep(KILL_SECONDS)
        if processes := worker_pool().process_ids:
            with suppress(ProcessLookupError):
                os.kill(generator.choice(processes), signal.SIGKILL)
                result.killed += 1


async def _attack(result: Soak, host: str, port: int, allowed: Set[int]) -> None:
    """Send one attack after the other, whose statuses must be `allowed`."""
    address = Address(host, port)
    for number in count():
        name = list(ATTACKS)[number % len(ATTACKS)]
        status = await ATTACKS[name](address, number)
        result.attacks[f"{name}: {status}"] += 1
        if status not in allowed:
            result.wrong.append(f"the attack {name!r} has status {status}")
        await asyncio.sleep(ATTACK_SECONDS)


class _FullDisk(DiskSpill):
    """A spill on a disk that is full for three of four blocks: writing them fails with ENOSPC."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.num_failed = 0
        super().__init__(folder, limit)

    def _write(self, key: bytes, block: bytes) -> int:
        if key[0] % 4:
            self._part(key).symlink_to("/dev/full")
        num_written = super()._write(key, block)
        self.num_failed += not num_written
        return num_written


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(
    requests: int,
    *,
    at_once: int = 24,
    distinct: int = 200,
    seed: int = 0,
    timeout: float = 120.0,
    attacks: bool = False,
    kills: bool = False,
    full_disk: bool = False,
    **engine: Any,
) -> Soak:
    """Run `requests` requests against a server on a tiny model, with a cache small enough to cause
    preemptions.

    Args:
        requests: Number of requests.
        at_once: Number of concurrent clients.
        distinct: Number of distinct request bodies.
        seed: Seed of the clients' choices.
        timeout: Timeout of a request, in seconds.
        attacks: Whether another client sends the requests of `ATTACKS`.
        kills: Whether worker processes are killed.
        full_disk: Whether evicted prefixes are written to a disk that is mostly full.
        **engine: Further options of the engine.
    """
    worker_pool().start()  # its pipes and event loop stay open
    result = Soak(requests)
    with tiny_llm(prefix_cache=False) as alone:
        expected = cases(distinct, random.Random(seed), alone)
    with ExitStack() as stack:
        llm = stack.enter_context(tiny_llm(**{"cache_positions": 2048, **engine}))
        llm.methods.max_learned_bytes = MAX_LEARNED_BYTES
        if full_disk:
            folder = stack.enter_context(TemporaryDirectory())
            spill = _FullDisk(Path(folder), 8 << 20)
            llm.engine.runners["target"].prefixes.spill = spill
        runner = llm.engine.runners["target"]
        settings = Settings(name="tiny", port=0, max_requests=10 * at_once)
        files = len(os.listdir("/proc/self/fd"))
        start = perf_counter()
        with LiveServer(llm, settings) as server:
            host, port = server.url.removeprefix("http://").split(":")
            clients = Clients(host, int(port), expected, seed, timeout)

            def sample_memory() -> None:
                gc.collect()
                result.memory.append(resident_bytes())
                result.bounded.append(cached_bytes() + llm.methods.learned_bytes)
                print(
                    f"{sum(result.kinds.values())} requests: {result.memory[-1] >> 20} MiB, of"
                    f" which {result.bounded[-1] >> 20} MiB have limits",
                    file=sys.stderr,
                    flush=True,
                )

            async def run_all() -> None:
                beside = [_kill_workers(result)] if kills else []
                allowed = ALLOWED_STATUSES | ({503} if kills else set())
                beside += [_attack(result, host, int(port), allowed)] if attacks else []
                tasks = [asyncio.ensure_future(one) for one in beside]
                await clients.run(result, at_once, sample_memory)
                for task in tasks:
                    task.cancel()
                for error in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(error, asyncio.CancelledError):
                        result.wrong.append(f"{type(error).__name__}: {error}")

            asyncio.run(run_all())
            for _ in range(500):
                if not llm.engine.has_work and not llm.driver._inbox:
                    break
                sleep(0.01)
            else:
                result.wrong.append("requests are still running after all clients have left")
        result.seconds = perf_counter() - start
        sample_memory()
        result.files_left = len(os.listdir("/proc/self/fd")) - files
        result.learned = llm.methods.learned_bytes
        result.preemptions = llm.engine.num_preemptions
        try:
            llm.engine.check_integrity()
        except AssertionError as error:
            result.wrong.append(f"the memory check failed: {error}")
        if full_disk:
            result.failed_writes = spill.num_failed
        llm.clear()
        result.slots_left = runner.pool.num_used
    if result.slots_left:
        result.wrong.append(f"{result.slots_left} positions of the cache were not freed")
    if result.files_left > 2:
        result.wrong.append(f"{result.files_left} files or sockets were left open")
    if requests >= 1000:
        result.check_memory()
    return result


def bench_soak(
    requests: Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")] = 10000,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Concurrent clients.")] = 24,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the clients' choices.")] = 0,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="A serving key of `anydecode methods`.")
    ] = None,
    drafting: Annotated[
        str | None,
        typer.Option("--drafting", help="Draft policy; default: smartspec-server."),
    ] = None,
    attacks: Annotated[
        bool, typer.Option("--attacks", help="Send expensive and invalid requests beside them.")
    ] = False,
    kills: Annotated[bool, typer.Option("--kills", help="Kill worker processes.")] = False,
    full_disk: Annotated[
        bool, typer.Option("--full-disk", help="Spill evicted prefixes to a disk that is full.")
    ] = False,
    json_file: JsonFile = None,
) -> int:
    """Send thousands of requests by unreliable clients; check for leaks and wrong texts.

    Example: anydecode bench soak --requests 10000
    """
    if not Path("/proc/self/statm").exists():
        raise InvalidRequestError(
            "this benchmark reads memory use from /proc, which this system does not have"
        )
    result = soak(
        requests,
        at_once=at_once,
        seed=seed,
        attacks=attacks,
        kills=kills,
        full_disk=full_disk,
        schedule=schedule,
        drafting=drafting,
    )
    write_report(vars(result), json_file, lambda: print_report(result))
    return 1 if result.wrong else 0


def print_report(result: Soak) -> None:
    """Print the counts, the memory over the run, and the first failures."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.kinds.most_common())
    print(f"{result.requests} requests in {result.seconds:.0f} s: {kinds}")
    print(f"{result.compared} answers compared with those of single requests")
    print(f"{result.preemptions} preemptions; {result.slots_left} positions left in use")
    print(f"{result.learned >> 20} MiB learned by decoders")
    if result.attacks:
        print("attacks: " + ", ".join(f"{n} x {name}" for name, n in result.attacks.items()))
    if result.killed:
        print(f"{result.killed} worker processes killed")
    if result.failed_writes:
        print(f"{result.failed_writes} blocks of the spill not written")
    sizes = " ".join(str(size >> 20) for size in result.memory)
    print(f"memory in MiB over the run: {sizes}")
    sizes = " ".join(str(size >> 20) for size in result.bounded)
    print(f"of which caches and decoders keep within limits: {sizes}")
    for line in result.wrong[:20]:
        print(f"WRONG: {line}")
    print("wrong: " + (str(len(result.wrong)) if result.wrong else "nothing"))
