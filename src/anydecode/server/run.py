"""The engine requests of one HTTP request: started, awaited, and cancelled on disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.scoring.prediction import Prediction
from anydecode.server.errors import ApiError
from anydecode.server.logprob_budget import max_logprobs

Receive = Callable[[], Any]


class Disconnected(Exception):
    """Raised when the client disconnects before the response is complete."""


class ServerRun:
    """The engine requests of one HTTP request, one per prompt.

    An async context manager: entering it starts the requests, and leaving it cancels those that
    still run. In between, `active` contains it.

    Args:
        llm: The model and its engine.
        requests: The engine requests.
        active: The runs of the same model that have started and not ended.
        on_end: Called when the block ends, before anything is cancelled.
        streamed: Whether `wait_for_progress` returns after every token, not only at the end. The
            texts of a search are known only at the end, and so is their number.
    """

    def __init__(
        self,
        llm: LLM,
        requests: list[Request],
        active: set[ServerRun],
        on_end: Callable[[ServerRun], None],
        streamed: bool = False,
    ) -> None:
        self.llm = llm
        self.streamed = streamed and not any(request.is_search for request in requests)
        self._active = active
        self._on_end = on_end
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._progress = asyncio.Event()
        self._is_wakeup_pending = False
        self._generations: list[Generation] | None = None

    async def __aenter__(self) -> ServerRun:
        self._active.add(self)
        for request in self.requests:
            request.notify(self._schedule_wakeup)
            self.llm.start(request)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._active.discard(self)
        self._on_end(self)
        self.cancel()

    @property
    def choices(self) -> list[tuple[Request, int]]:
        """(request, sample index) in the order of the response's choices."""
        return [(request, number) for request in self.requests for number in request.shown]

    @property
    def predictions(self) -> list[Prediction]:
        """The predictions of the answers, one per sample; empty if none is drafted from."""
        sequences = [job.sequence for request in self.requests for job in request.jobs]
        return [one.prediction for one in sequences if one.prediction is not None]

    @property
    def done(self) -> bool:
        return all(request.done for request in self.requests)

    @property
    def num_values(self) -> int:
        """About how many values the answer has: tokens, log-probabilities, and those of traces."""
        sequences = [job.sequence for request in self.requests for job in request.jobs]
        rounds = sum(len(one.trace or ()) for one in sequences)
        num_tokens = sum(len(one.tokens) for one in sequences)
        return num_tokens + 16 * rounds + max_logprobs(self.requests)

    def cancel(self) -> None:
        """Cancel the requests that still run. Their memory is freed after the current forward
        pass."""
        for request in self.requests:
            if not request.done:
                self.llm.abandon(request)

    async def wait_for_progress(self) -> None:
        """Wait for new tokens, or the end."""
        await self._progress.wait()
        self._progress.clear()

    async def wait_for_generations(self, receive: Receive) -> list[Generation]:
        """Wait for all requests and return their generations, one per sample.

        Raises:
            Disconnected: If the client disconnects first.
            Exception: The error that ended a request.
        """
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda _: self._progress.set())
        try:
            while not self.done:
                await self.wait_for_progress()
                if disconnect.done():
                    raise Disconnected
        finally:
            disconnect.cancel()
        return self.generations()

    def generations(self) -> list[Generation]:
        """The generations of finished requests, one per sample."""
        if self._generations is None:
            self._generations = self._collect()
        return self._generations

    def _collect(self) -> list[Generation]:
        samples = [sample for request in self.requests for sample in request.generation().samples]
        if any(sample.finish_reason == "cancelled" for sample in samples):
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        return samples

    def _schedule_wakeup(self) -> None:
        """Called on the engine's thread: schedule `_wake` on the event loop, unless it is already
        scheduled."""
        if not self._is_wakeup_pending and (self.streamed or self.done):
            self._is_wakeup_pending = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop has closed; nothing waits any more
                return

    def _wake(self) -> None:
        self._is_wakeup_pending = False
        self._progress.set()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
