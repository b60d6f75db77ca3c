"""One request at work: started, watched, counted, and cancelled when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.engine.request import Request
from anydecode.server.errors import ApiError

Receive = Callable[[], Any]


class Disconnected(Exception):
    """The client left before its answer was whole."""


class ServerRun:
    """Engine requests that answer one HTTP request, several where it holds several prompts.

    Use as an async context manager: whatever ends the block, nothing goes on decoding after it.
    `streamed`: wake for every token, not at the end only. `on_end` is told when the block ends,
    before anything is cancelled.
    """

    def __init__(
        self,
        llm: LLM,
        requests: list[Request],
        on_end: Callable[[ServerRun], None],
        streamed: bool = False,
    ) -> None:
        self.llm = llm
        self.streamed = streamed
        self._on_end = on_end
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._told = False
        self._answers: list[Generation] | None = None

    async def __aenter__(self) -> ServerRun:
        for request in self.requests:
            request.notify(self._tell)
            self.llm.start(request)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._on_end(self)
        self.cancel()

    @property
    def choices(self) -> list[tuple[Request, int]]:
        """(request, sample) in the order of the answer."""
        return [(request, number) for request in self.requests for number in request.shown]

    @property
    def done(self) -> bool:
        return all(request.done for request in self.requests)

    def cancel(self) -> None:
        """Stop whatever is still decoding; its memory is free after the pass under way."""
        for request in self.requests:
            if not request.done:
                self.llm.abandon(request)

    async def news(self) -> None:
        """Wait until there are new tokens, or the end."""
        await self._news.wait()
        self._news.clear()

    async def finished(self, receive: Receive) -> list[Generation]:
        """All answers, sample by sample. Raises `Disconnected` when the client leaves first, and
        what ended a request if something did."""
        leaving = asyncio.ensure_future(left(receive))
        leaving.add_done_callback(lambda _: self._news.set())
        try:
            while not self.done:
                await self.news()
                if leaving.done():
                    raise Disconnected
        finally:
            leaving.cancel()
        return self.generations()

    def generations(self) -> list[Generation]:
        """All answers of requests that are done."""
        if self._answers is None:
            self._answers = self._collected()
        return self._answers

    def _collected(self) -> list[Generation]:
        found = [sample for request in self.requests for sample in request.generation().samples]
        if any(sample.finish_reason == "cancelled" for sample in found):
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        return found

    def _tell(self) -> None:
        """On the engine's thread: wake the event loop, once until it has looked."""
        if not self._told and (self.streamed or self.done):
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._hear)
            except RuntimeError:  # the loop has closed; nobody waits any more
                return

    def _hear(self) -> None:
        self._told = False
        self._news.set()


async def left(receive: Receive) -> None:
    """Returns when the client has left."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
