"""Responses that are generated while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from anydecode.server import logs
from anydecode.server.errors import ApiError
from anydecode.server.responses.run import ResponseRun
from anydecode.server.responses.store import INTERRUPTED


class BackgroundRun:
    """One response that is generated in the background, with the events of its stream so far."""

    def __init__(self, run: ResponseRun, state: dict[str, Any]) -> None:
        self.run = run
        self.tenant = run.storage.tenant
        self.status = "queued"
        self.events = run.storage.events
        self._state = state
        self._error: str | None = None  # of a run that is stopped
        self._changed = asyncio.Event()
        self._is_stopping = self._is_done = False
        self.task = asyncio.ensure_future(self._generate())

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come."""
        position = start
        while True:
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self._is_done:
                return
            await self._changed.wait()

    async def stop(self, error: str | None = None) -> None:
        """Cancel the run; it has failed if there is an `error`. Returns when it has ended."""
        if not self._is_stopping:
            self._is_stopping = True
            self._error = error
            self.task.cancel()
        await asyncio.wait({self.task})

    def response(self) -> dict[str, Any]:
        """The response object so far."""
        return self.run.snapshot(self.status)

    async def _generate(self) -> None:
        try:
            async with self.run.chat_run.run:
                async for event in self.run.events():
                    self.status = "in_progress"
                    self._add(event)
        except asyncio.CancelledError:
            self._state.get("facts", {})["finish"] = "cancelled"
            self._add(await self.run.stop(self._error))
        finally:
            self._is_done = True
            self._notify()
            if (count := self._state.pop("count", None)) is not None:
                count()
            facts = self._state.get("facts", {})
            logs.event("background", id=self._state["id"], **facts)

    def _add(self, event: bytes) -> None:
        self.events.append(event)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRuns:
    """The responses that are generated in the background, by id: at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: dict[str, BackgroundRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def check_capacity(self) -> None:
        """Raise `ApiError` if there is no room for another response."""
        if len(self._runs) >= self._limit:
            message = f"{len(self._runs)} responses are running in the background; try again later"
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": "5"})

    def start(self, run: ResponseRun, state: dict[str, Any]) -> BackgroundRun:
        """Start a run. `state`: the `state` of the ASGI scope that asked for it."""
        self.check_capacity()
        one = self._runs[run.id] = BackgroundRun(run, state)
        one.task.add_done_callback(lambda _: self._runs.pop(run.id))
        return one

    def get(self, tenant: str | None, identity: str) -> BackgroundRun | None:
        """The run of a response; None if this tenant has none of this id that is running."""
        run = self._runs.get(identity)
        return None if run is None or run.tenant != tenant else run

    async def drain(self, seconds: float) -> None:
        """Wait for all runs to end; those that still run after `seconds` fail."""
        runs = list(self._runs.values())
        if runs:
            await asyncio.wait({run.task for run in runs}, timeout=seconds)
        await asyncio.gather(
            *(run.stop(INTERRUPTED["message"]) for run in runs if not run.task.done())
        )
