"""Runs the application with uvicorn, and shuts it down gracefully."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from anydecode.api.llm import LLM
from anydecode.server import logs
from anydecode.server.admission import AdmissionMiddleware
from anydecode.server.app import create_app
from anydecode.server.connection import LimitedProtocol
from anydecode.server.models import ServedModels, as_served
from anydecode.server.options import sampling_of
from anydecode.server.settings import Settings
from anydecode.server.telemetry import Telemetry, from_environment

#: How long a thread keeps the interpreter lock while others wait for it, in seconds: a tenth of
#: Python's default, which is as long as a token of a small model takes.
_SWITCH_SECONDS = 0.0005
#: How long after the requests have been ended at a shutdown their answers may still be sent, and
#: the interval at which requests that have started since are ended, in seconds.
_ANSWER_SECONDS, _END_SECONDS = 5, 0.1


class _Server(uvicorn.Server):
    """A uvicorn server that refuses new requests once a shutdown is requested, while running
    requests continue. A second SIGINT ends them, and their clients are answered that the server
    shuts down; a third one ends the process. If the engine has stopped, the server reports that for
    `drain_seconds`, and ends."""

    _loop: asyncio.AbstractEventLoop | None = None  # once it starts
    _is_urgent: asyncio.Event  # set by the second SIGINT
    _stop_time: float | None = None  # when the engine was found stopped
    _has_frozen = False  # whether the objects that no collection looks at are those of this server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # The engine's thread and the event loop wait so long for a thread that computes.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._is_urgent = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        state = self.config.app.app.state  # type: ignore[union-attr]
        await state.batches.resume()
        state.models.watch()
        # Afterwards, so that the server accepts requests sooner.
        self._warming = asyncio.ensure_future(self._warm(state.models))

    async def _warm(self, models: ServedModels) -> None:
        for service in models.loaded:
            await asyncio.to_thread(service.warm)
        if not models.can_unload and not gc.get_freeze_count():
            # Each collection of all objects blocks all threads, for about 0.1 s with those of a
            # server without requests. Those of a model that is unloaded would never be freed. An
            # application that has frozen its own objects keeps them so: they can only be unfrozen
            # together with those of the server.
            gc.collect()
            gc.freeze()
            self._has_frozen = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.config.app.app.state  # type: ignore[union-attr]
        responses, batches = state.responses, state.batches
        drained = asyncio.gather(responses.drain(), batches.drain())
        ending = asyncio.ensure_future(self._end_requests(state, drained))
        await asyncio.gather(super().shutdown(sockets), drained)
        ending.cancel()
        await responses.close()
        await state.models.stop()
        self._warming.cancel()
        if self._has_frozen:
            gc.unfreeze()

    async def _end_requests(self, state: Any, drained: asyncio.Future[Any]) -> None:
        """End the requests that still run after `drain_seconds`, or if the shutdown is urgent, so
        that they are answered: also those that are still being prepared then."""
        models: ServedModels = state.models
        try:
            await asyncio.wait_for(self._is_urgent.wait(), models.settings.drain_seconds)
            await asyncio.gather(state.responses.drain(0), state.batches.drain(0))
        except asyncio.TimeoutError:
            pass
        await asyncio.shield(drained)  # what runs in the background has ended in its own way
        while True:
            for service in models.loaded:
                for run in service.active:
                    run.cancel()
            await asyncio.sleep(_END_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        admission: AdmissionMiddleware = self.config.app  # type: ignore[assignment]
        if self._stop_time is None and admission.fault() is not None:
            self._stop_time = time.monotonic()
        is_over = (
            self._stop_time is not None
            and time.monotonic() >= self._stop_time + admission.settings.drain_seconds
        )
        return await super().on_tick(counter) or is_over

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        admission = self.config.app
        admission.draining = True  # type: ignore[union-attr]
        is_second = self.should_exit and sig == signal.SIGINT
        if is_second and self._loop is not None and not self._is_urgent.is_set():
            # uvicorn would leave at once, after a plain status 500 to the clients that wait.
            self._loop.call_soon_threadsafe(self._is_urgent.set)
        else:
            super().handle_exit(sig, frame)


def _server(models: ServedModels, telemetry: Telemetry | None = None) -> _Server:
    settings = models.settings
    config = uvicorn.Config(
        create_app(models, telemetry=telemetry),
        host=settings.host,
        port=settings.port,
        http=LimitedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + _ANSWER_SECONDS,
        timeout_keep_alive=30,
    )
    return _Server(config)


def serve(models: LLM | ServedModels, settings: Settings | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then shut down gracefully and close the models.

    Running requests are cancelled after the `drain_seconds` of the settings.

    Args:
        models: The model and its engine, or several models.
        settings: The settings of a single model; None for the defaults. Several models have theirs.

    Raises:
        EngineStoppedError: The engine has stopped after an internal error. The server has reported
            that for `drain_seconds`, and has shut down: start another process.
    """
    models = as_served(models, settings)
    settings = models.settings
    telemetry = from_environment(settings.name)
    logs.write_json_lines()
    # uvicorn raises the signal again when it exits; the engine must still be closed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logs.event(
        "start",
        model=settings.name,
        url=f"http://{settings.host}:{settings.port}",
        sampling=sampling_of(models.loaded[0].llm),
    )
    try:
        _server(models, telemetry).run()
    finally:
        error = models.error
        models.close()
        if telemetry is not None:
            telemetry.close()
        logs.event("stop")
    if error is not None:
        raise error


class LiveServer:
    """A server on a background thread, for notebooks, benchmarks and tests.

    A context manager: leaving the `with` block stops the server. The caller closes the models. Port
    0 picks a free port.

    Args:
        models: The model and its engine, or several models.
        settings: The settings of a single model; None for the defaults. Several models have theirs.
    """

    def __init__(self, models: LLM | ServedModels, settings: Settings | None = None) -> None:
        self._server = _server(as_served(models, settings))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        """`http://host:port`."""
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Shut down gracefully, as after a signal, and wait for the thread to end."""
        self._server.config.app.draining = True  # type: ignore[union-attr]
        self._server.should_exit = True
        self._thread.join()
