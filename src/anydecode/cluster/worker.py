"""A worker: a process with a model, which runs the tasks that the proxy of its fleet gives it.

The state of its tasks is in `Ledger`; this module connects it with the engine and with the network.
A worker that loses its proxy ends all tasks and joins again, as a new one: the proxy has given the
tasks to others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

from anydecode.api.llm import LLM
from anydecode.api.prefix_spill import parse_bytes
from anydecode.api.request import Request
from anydecode.cluster.blocks import PromptBlocks, digests_of
from anydecode.cluster.connection import Connection, FleetConnectionError
from anydecode.cluster.fingerprint import facts, group_of
from anydecode.cluster.fleet import BEAT_SECONDS, DEAD_SECONDS
from anydecode.cluster.leases import Key
from anydecode.cluster.ledger import (
    Abort,
    Action,
    Frame,
    Ledger,
    Pull,
    PullMedia,
    Send,
    Start,
    StartEncode,
    StartPrefill,
)
from anydecode.cluster.media import MediaCache, MediaEmbeds, pieces_of, read_media
from anydecode.cluster.message import from_message, media_of, plain_logprobs
from anydecode.engine.engine import Job
from anydecode.errors import AnydecodeError, FleetError
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.scoring.media import Encoder, Media
from anydecode.scoring.prompt_embeds import prefix_namespace
from anydecode.scoring.sequence import TARGET
from anydecode.serialization import to_plain
from anydecode.server import logs

log = logging.getLogger("anydecode")

#: How long the blocks of a prompt may take to come from another worker, in seconds.
PULL_SECONDS = 10.0
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class WorkerOptions:
    """What a process needs to be a worker. The arguments are those of `LLM` and `Worker`.

    Args:
        model: The model.
        host: Where its proxy listens for workers.
        port: The port.
        engine: Options of `LLM`.
    """

    model: str
    host: str
    port: int
    engine: dict[str, Any]
    name: str = ""
    role: str = "mixed"
    max_running: int = 64
    handover_memory: str = "1GiB"
    patience: float = 60.0


def work(options: WorkerOptions, secret: bytes) -> None:
    """Be a worker until the proxy has drained this one.

    Raises:
        FleetError: The proxy cannot be reached, or refuses this worker.
    """
    with LLM(options.model, **options.engine) as llm:
        worker = Worker(
            llm,
            secret,
            name=options.name,
            role=options.role,
            max_running=options.max_running,
            handover_memory=options.handover_memory,
            patience=options.patience,
        )
        asyncio.run(worker.run(options.host, options.port))


@dataclass(eq=False)
class _Run:
    """A generation that runs for a task. `job`: that of its sample."""

    request: Request
    job: Job
    num_sent: int
    is_waking: bool = False
    has_ended: bool = False


class Worker:
    """Runs the tasks of a fleet on an engine.

    Args:
        llm: The model and its engine. Blocks that come from other workers are put into the spill of
            its prefix cache; without one, it gets one in main memory.
        secret: The secret of the fleet.
        name: A name for people, which no other worker of the fleet has.
        role: "mixed", "encode", "prefill" or "decode".
        max_running: Maximum number of tasks at a time.
        handover_memory: Size of the memory for blocks of other workers: a number of bytes, or a
            text such as "1GiB".
        patience: How long it tries to reach its proxy, in seconds.
        encoder: Computes the embeddings of images; None: a `PatchEncoder`.
    """

    def __init__(
        self,
        llm: LLM,
        secret: bytes,
        *,
        name: str = "",
        role: str = "mixed",
        max_running: int = 64,
        handover_memory: str | int = "1GiB",
        patience: float = 60.0,
        encoder: Encoder | None = None,
    ) -> None:
        self.llm = llm
        self._secret = secret
        self._name = name or f"worker-{os.getpid()}"
        self._role = role
        self._max_running = max_running
        self._patience = patience
        self._runner = llm.engine.runners[TARGET]
        self.media = MediaCache(encoder or PatchEncoder(llm.model.spec.hidden_size))
        self._group = group_of(llm, self.media.encoder)
        self._facts = facts(llm, self.media.encoder)
        self.blocks = PromptBlocks(self._runner, parse_bytes(handover_memory))
        self.llm.driver.run_in_background()

    async def run(self, host: str, port: int) -> None:
        """Work for the proxy at this address until it has drained this worker.

        Raises:
            FleetError: The proxy cannot be reached in time, or refuses this worker.
        """
        last_contact = time.monotonic()
        while True:
            try:
                connection = await Connection.open(host, port, self._secret)
                try:
                    is_drained = await _Session(self, connection).run()
                finally:
                    connection.close()
                if is_drained:
                    return
                last_contact = time.monotonic()
                logs.event("proxy_lost", worker=self._name)
            except FleetConnectionError:
                if time.monotonic() - last_contact > self._patience:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def between_passes(self, function: Any, *arguments: Any) -> Any:
        """The result of a function that runs on the engine's thread between two passes."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value, error = function(*arguments), None
            except Exception as caught:  # the engine is not at fault
                value, error = None, caught
            loop.call_soon_threadsafe(_resolve, result, value, error)

        self.llm.driver.post(run)
        return await result

    def join_frame(self, incarnation: str, address: tuple[str, int]) -> Frame:
        """The first frame to the proxy."""
        return {
            "type": "join",
            "name": self._name,
            "incarnation": incarnation,
            "role": self._role,
            "group": self._group,
            "facts": self._facts,
            "address": list(address),
            "max_running": self._max_running,
            "positions": self._runner.pool.num_slots,
            "pid": os.getpid(),
        }

    def load(self) -> Frame:
        """Numbers for the beat."""
        runners = self.llm.engine.runners.values()
        return {
            "passes": sum(runner.num_passes for runner in runners) + self.media.num_encoded,
            "rows": self._runner.num_rows,
            "used": self._runner.pool.num_used,
            "hits": self._runner.prefixes.num_hits,
            "restored": self._runner.prefixes.num_restored,
            "preemptions": self.llm.engine.num_preemptions,
        }

    @property
    def max_running(self) -> int:
        return self._max_running

    @property
    def group(self) -> str:
        return self._group

    @property
    def secret(self) -> bytes:
        return self._secret


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class _Session:
    """A worker's membership in a fleet, from joining until the connection ends."""

    def __init__(self, worker: Worker, connection: Connection) -> None:
        self._worker = worker
        self._connection = connection
        self._incarnation = uuid.uuid4().hex
        positions = worker.llm.engine.runners[TARGET].pool.num_slots
        self._ledger = Ledger(self._incarnation, worker.max_running, positions)
        self._runs: dict[Key, _Run] = {}
        self._steps: dict[Key, asyncio.Task[None]] = {}
        self._blocks: dict[Key, list[bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._last_received = time.monotonic()

    async def run(self) -> bool:
        """Work until the connection ends. Returns whether the proxy has drained this worker.

        Raises:
            FleetError: The proxy refuses this worker.
        """
        host = self._connection.own_host
        server = await asyncio.start_server(self._serve_peer, host, 0)
        beats = asyncio.create_task(self._beat())
        try:
            address = host, server.sockets[0].getsockname()[1]
            self._connection.send(self._worker.join_frame(self._incarnation, address))
            while True:
                try:
                    frame, _ = await self._connection.receive()
                except FleetConnectionError:
                    return False
                self._last_received = time.monotonic()
                if frame["type"] == "unwelcome":
                    raise FleetError(frame["reason"])
                if frame["type"] == "stop":
                    return True
                self._ledger.handle(frame)
                self._perform()
        finally:
            beats.cancel()
            server.close()
            for step in self._steps.values():
                step.cancel()
            for run in self._runs.values():
                self._worker.llm.driver.cancel(run.job)

    async def _beat(self) -> None:
        while True:
            self._ledger.beat(time.monotonic(), **self._worker.load())
            self._perform()
            if time.monotonic() - self._last_received > DEAD_SECONDS:
                self._connection.close()  # which ends the session
            await asyncio.sleep(BEAT_SECONDS)

    def _perform(self) -> None:
        """Do what the ledger asks for."""
        while self._ledger.actions:
            actions, self._ledger.actions = self._ledger.actions, []
            for action in actions:
                self._perform_one(action)
        for key, _ in self._ledger.leases.ended:
            self._blocks.pop(key, None)
        self._ledger.leases.ended.clear()

    def _perform_one(self, action: Action) -> None:
        if isinstance(action, Send):
            try:
                self._connection.send(action.frame)
            except FleetConnectionError as error:
                logs.event("proxy_unreachable", reason=str(error))
                self._connection.close()
        elif isinstance(action, Pull):
            self._start_step(action.key, self._pull(action.key, action.source, action.frame))
        elif isinstance(action, PullMedia):
            self._start_step(action.key, self._pull_media(action.key, action.frame))
        elif isinstance(action, StartEncode):
            self._start_step(action.key, self._encode(action.key, action.frame))
        elif isinstance(action, Start):
            self._start_step(action.key, self._start(action.key, action.frame))
        elif isinstance(action, StartPrefill):
            self._start_step(action.key, self._prefill(action.key, action.frame))
        elif isinstance(action, Abort):
            if (step := self._steps.pop(action.key, None)) is not None:
                step.cancel()
            if (run := self._runs.pop(action.key, None)) is not None:
                self._worker.llm.driver.cancel(run.job)

    def _start_step(self, key: Key, step: Any) -> None:
        task = asyncio.create_task(step)
        self._steps[key] = task
        task.add_done_callback(lambda done: self._end_step(key, done))

    def _end_step(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._steps.get(key) is task:
            del self._steps[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(key, error)

    def _fail(self, key: Key, error: BaseException) -> None:
        is_final = isinstance(error, AnydecodeError)
        if not is_final:
            log.error("a task failed", exc_info=error)
        message = str(error) if is_final else f"a worker failed: {type(error).__name__}"
        self._ledger.failed(key, type(error).__name__, message, is_final)
        self._perform()

    # Generation.

    async def _start(self, key: Key, frame: Frame) -> None:
        request, job = await asyncio.to_thread(self._request, frame)
        if key not in self._ledger.tasks:
            return
        self._run(key, request, job, len(frame["generated"]))

    def _request(self, frame: Frame) -> tuple[Request, Job]:
        options = self._with_embeds(from_message(frame["message"]["options"]), frame)
        number = frame["message"]["sample"]
        if generated := frame["generated"]:
            sample = {"number": number, "tokens": generated}
            options["resume"] = {"seed": options["seed"], "samples": [sample]}
            number = 0
        request = self._worker.llm.request(frame["prompt"], **options)
        return request, request.jobs[number]

    def _with_embeds(self, options: dict[str, Any], frame: Frame) -> dict[str, Any]:
        """The options of a request, with embeddings in place of images. Those that were not handed
        over are computed now, unless the prompt is computed elsewhere."""
        if media := options.get("prompt_embeds"):
            embeds = [MediaEmbeds(one, self._worker.media) for one in media]
            for one in embeds if frame["encoded"] else ():
                one.read()
            options["prompt_embeds"] = embeds
        return options

    def _run(self, key: Key, request: Request, job: Job, num_sent: int) -> None:
        run = self._runs[key] = _Run(request, job, num_sent)

        def on_progress() -> None:  # on the engine's thread
            if not run.is_waking:
                run.is_waking = True
                self._loop.call_soon_threadsafe(self._on_progress, key, run)

        request.notify(on_progress)
        self._worker.llm.driver.submit(job)

    def _on_progress(self, key: Key, run: _Run) -> None:
        run.is_waking = False
        if self._runs.get(key) is not run or run.has_ended:
            return
        is_done, sequence = run.job.done, run.job.sequence  # in this order
        logprobs = None
        tokens = list(sequence.tokens)
        if sequence.compute_logprobs is not None:
            tokens = tokens[: len(sequence.logprobs)]  # which the engine's thread adds behind them
            logprobs = plain_logprobs(sequence.logprobs[run.num_sent : len(tokens)])
        new = tokens[run.num_sent :]
        run.num_sent = len(tokens)
        if frame_is_prefill(self._ledger, key):
            if is_done:
                self._end(key, run)
                self._start_step(key, self._offer(key, run))
            return
        self._ledger.produced(key, new, logprobs)
        if is_done:
            self._end(key, run)
            self._report(key, run)
        self._perform()

    def _end(self, key: Key, run: _Run) -> None:
        run.has_ended = True
        del self._runs[key]

    def _report(self, key: Key, run: _Run) -> None:
        job, sequence = run.job, run.job.sequence
        if job.error is not None:
            self._fail(key, job.error)
        elif sequence.finish_reason == "cancelled":
            self._ledger.failed(key, "FleetError", "a worker has stopped", is_final=False)
        else:
            number = run.request.jobs.index(job)
            generation = run.request.generation().samples[number]
            stats = generation.stats
            self._ledger.ended(
                key,
                finish=sequence.finish_reason,
                passes=stats.passes,
                rows=stats.rows,
                cached=stats.num_cached_tokens,
                predictions=[stats.num_accepted_predictions, stats.num_rejected_predictions],
                constraint=to_plain(generation.constraint),
                trace=to_plain(generation.trace),
            )

    # Hand-over: the side that computes a prompt.

    async def _prefill(self, key: Key, frame: Frame) -> None:
        request = await asyncio.to_thread(self._prompt_request, frame)
        if key in self._ledger.tasks:
            self._run(key, request, request.jobs[0], 0)

    def _prompt_request(self, frame: Frame) -> Request:
        options = self._with_embeds(from_message(frame["options"]), frame)
        return self._worker.llm.request(
            frame["tokens"], decoder="autoregressive", max_tokens=1, **options
        )

    async def _offer(self, key: Key, run: _Run) -> None:
        if run.job.error is not None:
            raise run.job.error
        frame = self._ledger.tasks[key].frame
        blocks = await self._worker.between_passes(
            self._worker.blocks.cached, frame["tokens"], run.request.namespace
        )
        self._keep(key, blocks[: frame["num_blocks"]])

    async def _encode(self, key: Key, frame: Frame) -> None:
        rows = await asyncio.to_thread(self._worker.media.rows, read_media(frame["media"]))
        self._keep(key, pieces_of(rows))

    def _keep(self, key: Key, blocks: list[bytes]) -> None:
        """Offer blocks of a task that has ended here."""
        size = sum(map(len, blocks))
        if self._ledger.prefilled(key, len(blocks), size, time.monotonic()):
            self._blocks[key] = blocks
        self._perform()

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give the blocks of one lease to another worker."""
        try:
            connection = await Connection.accept(reader, writer, self._worker.secret)
        except FleetConnectionError as error:
            logs.event("fleet_connection_refused", reason=str(error))
            return
        try:
            await asyncio.wait_for(self._give(connection), PULL_SECONDS)
        except (FleetConnectionError, asyncio.TimeoutError):
            pass  # the lease ends by itself
        finally:
            connection.close()
            self._perform()

    async def _give(self, connection: Connection) -> None:
        frame, _ = await connection.receive()
        key, holder = (frame["task"], frame["attempt"]), frame["holder"]
        leases = self._ledger.leases
        is_here = frame["group"] == self._worker.group and leases.reserve(
            key, holder, time.monotonic()
        )
        blocks = self._blocks.get(key, ()) if is_here else ()
        connection.send({"type": "reserved", "count": len(blocks)})
        frame, _ = await connection.receive()
        if blocks and leases.pull(key, holder, time.monotonic()):
            for block in blocks[frame["start"] :]:
                connection.send({"type": "block"}, block)
                await connection.drained()
        frame, _ = await connection.receive()
        leases.acknowledge(key, holder)

    # Hand-over: the side that goes on.

    async def _pull(self, key: Key, source: Frame, frame: Frame) -> None:
        try:
            await asyncio.wait_for(self._fetch(source, frame), PULL_SECONDS)
        except (FleetConnectionError, asyncio.TimeoutError) as error:
            reason = str(error) or f"the blocks did not come within {PULL_SECONDS:g} s"
            logs.event("handover_failed", reason=reason)  # the prompt is computed again
        self._ledger.pulled(key)
        self._perform()

    async def _fetch(self, source: Frame, frame: Frame) -> None:
        worker, options = self._worker, frame["message"]["options"]
        names = [(one.first, one.key(worker.media.encoder)) for one in media_of(options)]
        namespace = prefix_namespace(options.get("namespace"), names)
        tokens = frame["prompt"][:-1]
        digests = digests_of(tokens, namespace)
        num_here = await worker.between_passes(worker.blocks.num_cached, tokens, namespace)
        blocks = await self._blocks_of(source, num_here)
        found = dict(zip(digests[num_here:], blocks, strict=False))
        await worker.between_passes(worker.blocks.store, found)

    async def _pull_media(self, key: Key, frame: Frame) -> None:
        options = frame["options"] if frame["type"] == "prefill" else frame["message"]["options"]
        pulls = [
            self._fetch_media(one, source)
            for one, source in zip(media_of(options), frame["encoded"], strict=True)
            if source is not None and one.key(self._worker.media.encoder) not in self._worker.media
        ]
        await asyncio.gather(*pulls)
        self._ledger.media_pulled(key)
        self._perform()

    async def _fetch_media(self, media: Media, source: Frame) -> None:
        reason = "the embeddings are not there any more"
        try:
            pieces = await asyncio.wait_for(self._blocks_of(source, 0), PULL_SECONDS)
            if self._worker.media.store(media, pieces):
                return
        except FleetConnectionError as error:
            reason = str(error)
        except asyncio.TimeoutError:
            reason = f"the embeddings did not come within {PULL_SECONDS:g} s"
        logs.event("media_handover_failed", reason=reason)  # they are computed again

    async def _blocks_of(self, source: Frame, start: int) -> list[bytes]:
        """The blocks from number `start` on that another worker keeps under a lease."""
        host, port = source["address"]
        connection = await Connection.open(host, port, self._worker.secret)
        try:
            connection.send(
                {
                    "type": "reserve",
                    "task": source["task"],
                    "attempt": source["attempt"],
                    "holder": self._incarnation,
                    "group": self._worker.group,
                }
            )
            reserved, _ = await connection.receive()
            connection.send({"type": "pull", "start": start})
            blocks = [(await connection.receive())[1] for _ in range(start, reserved["count"])]
            connection.send({"type": "acknowledge"})
            await connection.drained()
            return blocks
        finally:
            connection.close()


def frame_is_prefill(ledger: Ledger, key: Key) -> bool:
    """Whether a task is a prompt that is computed for another worker."""
    task = ledger.tasks.get(key)
    return task is not None and task.frame["type"] == "prefill"
