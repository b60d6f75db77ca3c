"""The proxy of a fleet: a model whose requests run on workers.

`FleetLLM` checks requests and makes their text as every `LLM` does, so that the server runs on it
unchanged; in place of its engine, workers compute the tokens. The state of all tasks is in `Fleet`;
this module connects it with the network.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any

from anydecode import errors
from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.api.methods import build_as
from anydecode.api.prefix_spill import stable_name
from anydecode.api.request import Request
from anydecode.api.resources import Resources
from anydecode.api.sample_order import SampleOrder
from anydecode.cluster.connection import Connection, FleetConnectionError
from anydecode.cluster.control.roles import RoleControl
from anydecode.cluster.fingerprint import facts
from anydecode.cluster.fleet import (
    BEAT_SECONDS,
    ROLES,
    Deliver,
    Expel,
    Fail,
    Finish,
    Fleet,
    FleetAction,
    Part,
    SendTo,
    Task,
    WorkerFacts,
)
from anydecode.cluster.ledger import Frame
from anydecode.cluster.message import can_resume, read_logprobs, to_message
from anydecode.decoders.decoder import Decoder
from anydecode.engine.driver import Driver
from anydecode.engine.engine import Engine, Job
from anydecode.errors import (
    AnydecodeError,
    EngineStoppedError,
    FleetError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.memory.prefix import block_digests
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.sampling.params import SamplingParams
from anydecode.scoring.media import Encoder, Media
from anydecode.scoring.state import StateKey
from anydecode.server import logs
from anydecode.server.event_loop import EventLoopThread

#: The task of a sample, and what its worker has reported at its end.
_TASK: StateKey[Task] = StateKey("cluster", "task")
_REPORT: StateKey[Frame] = StateKey("cluster", "report")

#: The names of workers, which are labels of metrics, too.
_NAME = r"[A-Za-z0-9._-]{1,64}"
#: How long a drained worker may go on with its tasks, in seconds.
DRAIN_SECONDS = 60.0


class FleetDriver(Driver):
    """Runs jobs on the workers of a fleet, which connect to it. An event loop on a thread of its
    own holds the fleet's state.

    Args:
        engine: The engine of the proxy's model, which computes nothing.
        own_facts: The facts of the model, which those of workers must match.
        secret: The secret of the fleet.
        host: The address to listen on for workers.
        port: The port; 0 picks a free one.
        control: Changes the roles of workers; None: they stay.

    Attributes:
        port: The port that workers connect to.

    Raises:
        InvalidRequestError: The address cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        own_facts: Frame,
        secret: bytes,
        host: str,
        port: int,
        control: RoleControl | None = None,
    ) -> None:
        super().__init__(engine)
        self.fleet = Fleet(control)
        self._own_facts = own_facts
        self._secret = secret
        self._jobs: dict[int, Job] = {}
        self._connections: dict[str, Connection] = {}
        self._progress = threading.Condition()
        self._events = EventLoopThread("anydecode-fleet")
        try:
            self._server = self._events.run(asyncio.start_server(self._serve, host, port))
        except OSError as error:
            self._events.close()
            raise InvalidRequestError(
                f"workers cannot connect to {host}:{port}: {error.strerror}; choose another"
                " --fleet-host or --fleet-port"
            ) from None
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._ticks = asyncio.run_coroutine_threadsafe(self._tick(), self._events.loop)

    @property
    def num_running(self) -> int:
        """Number of samples that are on a worker."""
        return self.fleet.num_running

    @property
    def num_waiting(self) -> int:
        """Number of samples that wait for a worker."""
        return self.fleet.num_waiting

    def submit(self, job: Job) -> None:
        """Give the task of a job to a worker.

        Raises:
            EngineStoppedError: The driver is closed.
        """
        if self._closed:
            raise EngineStoppedError("the fleet is closed: open another")
        self._events.loop.call_soon_threadsafe(self._submit, job)

    def cancel(self, job: Job) -> None:
        """End a job, and its task on the worker."""
        if not job.done and not self._closed:
            self._events.loop.call_soon_threadsafe(self._cancel, job)

    def advance(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` is true, which depends on the progress of jobs."""
        with self._progress:
            while not until():
                if (error := self.error) is not None:
                    raise error
                self._progress.wait()

    def run_in_background(self) -> None:
        """Nothing to start: the fleet's thread always runs."""

    def close(self) -> None:
        """Cancel all jobs and end the connections; the workers end their tasks then."""
        if self._closed:
            return
        self._closed = True
        self._events.run(self._close())
        self._events.close()
        self.engine.close()

    def status(self) -> Frame:
        """The workers, tasks and counters."""
        return self._events.run(self._status())

    async def _close(self) -> None:
        self._ticks.cancel()
        self._server.close()
        for job in list(self._jobs.values()):
            self._cancel(job)
        for connection in self._connections.values():
            connection.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # Jobs.

    def _submit(self, job: Job) -> None:
        if job.done:
            return
        task = job.sequence.state[_TASK]
        self._jobs[task.number] = job
        self.fleet.submit(task, time.monotonic())
        self._perform()

    def _cancel(self, job: Job) -> None:
        task = job.sequence.state[_TASK]
        if self._jobs.pop(task.number, None) is not None:
            self.fleet.cancel(task.number, time.monotonic())
            self._perform()
        self.engine.cancel(job)
        self._notify()

    def _notify(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _deliver(self, action: Deliver) -> None:
        job = self._jobs[action.task]
        sequence = job.sequence
        taken, _ = sequence.stop_checker.push(action.tokens)
        sequence.tokens.extend(action.tokens[:taken])
        if action.logprobs is not None:
            sequence.logprobs.extend(read_logprobs(action.logprobs[:taken]))
        self.engine.num_tokens += taken
        if job.on_progress is not None:
            job.on_progress(job)
        self._notify()

    def _finish(self, action: Finish) -> None:
        job, result = self._jobs.pop(action.task), action.result
        sequence = job.sequence
        sequence.state[_REPORT] = result
        sequence.num_passes, sequence.num_rows = result["passes"], result["rows"]
        sequence.num_cached_tokens = result["cached"]
        if sequence.prediction is not None:
            prediction = sequence.prediction
            prediction.num_accepted, prediction.num_rejected = result["predictions"]
        if sequence.trace is not None:
            sequence.trace.extend(result["trace"] or ())
        self._end(job, result["finish"], None)

    def _fail(self, action: Fail) -> None:
        kind = getattr(errors, action.kind, FleetError)
        try:
            error: AnydecodeError = kind(action.message)
        except TypeError:  # an error with further arguments
            error = AnydecodeError(action.message)
        self._end(self._jobs.pop(action.task), "error", error)

    def _end(self, job: Job, reason: str, error: AnydecodeError | None) -> None:
        checker: Any = job.sequence.stop_checker
        if checker.finish_reason is None:
            checker.end(reason)
        job.sequence.finish_reason = reason
        job.error = error
        job.done = True
        if job.on_finish is not None:
            job.on_finish(job)
        self._notify()

    # Workers.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            self.fleet.tick(time.monotonic())
            self._perform()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process that has connected: a worker, or a command of the operator."""
        try:
            connection = await Connection.accept(reader, writer, self._secret)
        except FleetConnectionError as error:
            logs.event("fleet_connection_refused", reason=str(error))
            return
        try:
            frame, _ = await connection.receive()
            if frame["type"] == "join":
                await self._serve_worker(connection, frame)
            else:
                connection.send(await self._answer(frame))
                await connection.drained()
        except FleetConnectionError:
            pass  # its tasks have been given to others
        except (KeyError, TypeError, ValueError) as error:
            logs.event("fleet_connection_broken", reason=repr(error))
        except asyncio.CancelledError:
            pass  # the fleet is closed
        finally:
            connection.close()

    async def _serve_worker(self, connection: Connection, frame: Frame) -> None:
        reason = self._version_mismatch(frame)
        if reason is not None:
            await self._refuse(connection, reason)
            return
        incarnation = frame["incarnation"]
        worker = WorkerFacts(
            name=frame["name"],
            incarnation=incarnation,
            role=frame["role"],
            group=frame["group"],
            address=(frame["address"][0], frame["address"][1]),
            max_running=frame["max_running"],
            positions=frame["positions"],
            pid=frame["pid"],
        )
        reason = self._mismatch(worker, frame["facts"])
        if reason is None:
            self._connections[incarnation] = connection
            reason = self.fleet.join(worker, time.monotonic())
        if reason is not None:
            self._connections.pop(incarnation, None)
            await self._refuse(connection, reason)
            return
        logs.event("worker_joined", worker=worker.name, role=worker.role, group=worker.group)
        self._perform()
        reason = "the fleet is closed"
        try:
            while True:
                frame, _ = await connection.receive()
                self.fleet.receive(incarnation, frame, time.monotonic())
                self._perform()
        except FleetConnectionError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has sent no frame of a worker: {error!r}"
        finally:
            if self._connections.pop(incarnation, None) is not None:  # it was not given up
                logs.event("worker_left", worker=worker.name, reason=reason)
            self.fleet.leave(incarnation, time.monotonic())
            self._perform()

    @staticmethod
    async def _refuse(connection: Connection, reason: str) -> None:
        logs.event("worker_refused", reason=reason)
        connection.send({"type": "unwelcome", "reason": reason})
        await connection.drained()

    def _version_mismatch(self, frame: Frame) -> str | None:
        """Why a worker of another version is refused, whose frame may have other entries."""
        given, own = frame["facts"]["version"], self._own_facts["version"]
        if given == own:
            return None
        return (
            f"the worker {frame['name']} has version {given} of anydecode, and the proxy {own}:"
            " install the same"
        )

    def _mismatch(self, worker: WorkerFacts, given: Frame) -> str | None:
        """Why a worker cannot serve the proxy's model, or None."""
        if worker.role not in ROLES:
            return f"the role of a worker is {worker.role!r}; it may be {', '.join(ROLES)}"
        if not re.fullmatch(_NAME, worker.name):
            return (
                f"the name of a worker is {worker.name[:80]!r}; give a --name of 1 to 64 letters,"
                " digits, dots, hyphens and underscores"
            )
        for runner, expected in self._own_facts["runners"].items():
            found = given["runners"].get(runner)
            if found is None:
                return (
                    f"the worker {worker.name} has no {runner} model, and the proxy has one: start"
                    " both with the same --draft"
                )
            for what in ("model", "dtype"):
                if found[what] != expected[what]:
                    return (
                        f"the worker {worker.name} has another {runner} {what} than the proxy:"
                        " start both with the same model, --draft and --dtype"
                    )
        if given["encoder"] != self._own_facts["encoder"]:
            return (
                f"the worker {worker.name} has another encoder of images than the proxy: start both"
                " with the same"
            )
        return None

    async def _answer(self, frame: Frame) -> Frame:
        """The answer to a command of the operator."""
        if frame["type"] == "status":
            return await self._status()
        if frame["type"] == "drain":
            reason = self.fleet.drain(frame["name"], frame["seconds"], time.monotonic())
            self._perform()
            return {"type": "drained", "reason": reason}
        return {"type": "unknown", "reason": f"there is no command {frame['type']!r}"}

    async def _status(self) -> Frame:
        return self.fleet.status(time.monotonic())

    def _perform(self) -> None:
        """Do what the fleet asks for."""
        while self.fleet.actions:
            actions, self.fleet.actions = self.fleet.actions, []
            for action in actions:
                self._perform_one(action)

    def _perform_one(self, action: FleetAction) -> None:
        if isinstance(action, SendTo):
            connection = self._connections.get(action.incarnation)
            if connection is not None:
                try:
                    connection.send(action.frame)
                except FleetConnectionError as error:
                    logs.event("worker_unreachable", reason=str(error))
                    connection.close()
        elif isinstance(action, Expel):
            logs.event("worker_given_up", worker=action.name, reason=action.reason)
            if (connection := self._connections.pop(action.incarnation, None)) is not None:
                connection.close()
        elif isinstance(action, Deliver):
            self._deliver(action)
        elif isinstance(action, Finish):
            self._finish(action)
        elif isinstance(action, Fail):
            self._fail(action)


class FleetRequest(Request):
    """A request whose samples run on workers.

    Raises:
        UnsupportedCombinationError: Its samples depend on each other.
    """

    def __init__(
        self,
        resources: Resources,
        prompt: list[int],
        decoder: Decoder,
        params: SamplingParams,
        **options: Any,
    ) -> None:
        super().__init__(resources, prompt, decoder, params, **options)
        depends = self._order in (SampleOrder.IN_TURN, SampleOrder.RANKED)
        if depends and len(self.jobs) > 1:
            raise UnsupportedCombinationError(
                f"n is {len(self.jobs)}, which a fleet of workers does not support with decoder"
                f" {self.name!r}"
            )
        self.can_resume = can_resume(self, decoder)

    def _sample(self, number: int) -> Generation:
        generation = super()._sample(number)
        report = self.jobs[number].sequence.state.get(_REPORT)
        if report is None or self.constraint is None:
            return generation
        own = self.constraint.report().to_dict()
        return replace(generation, constraint={**(report["constraint"] or {}), **own})


class FleetLLM(LLM):
    """A language model whose requests run on the workers of a fleet.

    Args:
        model: As for `LLM`. The proxy reads its files, and computes nothing with them.
        secret: The secret of the fleet.
        fleet_host: The address to listen on for workers.
        fleet_port: The port; 0 picks a free one (`fleet_port` then has it).
        ratio: Changes the roles of workers: a catalogue key ("pd-serve:period=10") or an object.
        encoder: The workers' encoder of images, whose fingerprint and sizes are used here; None: a
            `PatchEncoder`.
        **options: Those of `LLM`, the same as the workers'.

    Raises:
        InvalidRequestError: The address cannot be used; or as `LLM`.
    """

    request_type = FleetRequest

    def __init__(
        self,
        model: Any,
        secret: bytes,
        *,
        fleet_host: str = "127.0.0.1",
        fleet_port: int = 0,
        ratio: str | RoleControl | None = None,
        encoder: Encoder | None = None,
        **options: Any,
    ) -> None:
        control = None if ratio is None else build_as(ratio, RoleControl)
        super().__init__(model, **options)
        self._numbers = count()
        self.image_encoder: Encoder = encoder or PatchEncoder(self.model.spec.hidden_size)
        self.driver: FleetDriver = FleetDriver(
            self.engine, facts(self, self.image_encoder), secret, fleet_host, fleet_port, control
        )

    @property
    def fleet_port(self) -> int:
        """The port that workers connect to."""
        return self.driver.port

    def status(self) -> Frame:
        """The workers, tasks and counters of the fleet, as JSON."""
        return self.driver.status()

    def request(self, prompt: Any, **options: Any) -> Request:
        """As `LLM.request`, with `Media` in `prompt_embeds`, which workers encode.

        Raises:
            UnsupportedCombinationError: An option cannot be served by a fleet, too.
        """
        media = options.get("prompt_embeds") or []
        if not (isinstance(media, Seq) and all(isinstance(one, Media) for one in media)):
            raise UnsupportedCombinationError(
                "a fleet of workers computes the embeddings of prompt_embeds itself: give a list of"
                " Media"
            )
        if media:
            options["prompt_embeds"] = [one.placeholder(self.image_encoder) for one in media]
        request = super().request(prompt, **options)
        options = {**request.sampling_defaults, **options, "prompt_embeds": media or None}
        message = to_message(request, options)
        assert isinstance(request, FleetRequest)
        digests, priority = self._digests(request), options.get("priority") or 0
        for number, job in enumerate(request.jobs):
            job.sequence.state[_TASK] = Task(
                number=next(self._numbers),
                prompt=request.prompt,
                max_tokens=request.limit,
                message={"options": message, "sample": number},
                digests=digests,
                is_resumable=request.can_resume,
                priority=priority,
                parts=self._parts(request, message.get("prompt_embeds", []), priority),
            )
        return request

    def measurement(self, *given: Any, **options: Any) -> Request:
        """Raises UnsupportedCombinationError."""
        raise UnsupportedCombinationError(
            "a fleet of workers generates text only: serve embeddings, reranking and scores with"
            " `anydecode serve`"
        )

    def _parts(self, request: Request, media: list[Any], priority: int) -> list[Part]:
        """The images of a prompt as tasks, numbered by size with the largest first."""
        embeds = request.prompt_embeds
        numbers = {
            index: next(self._numbers)
            for index in sorted(range(len(media)), key=lambda one: -len(embeds[one].rows))
        }
        return [
            Part(
                number=numbers[index],
                prompt=[],
                max_tokens=0,
                message=one,
                digests=[bytes.fromhex(embeds[index].key)],
                priority=priority,
                num_rows=len(embeds[index].rows),
            )
            for index, one in enumerate(media)
        ]

    def _digests(self, request: Request) -> list[bytes]:
        name = stable_name((-1, request.namespace))
        if name is None or not (self.model.spec.causal and self.resources.prefix_cache):
            return []
        return block_digests(name, request.prompt[:-1])
