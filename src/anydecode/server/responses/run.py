"""A response that is being generated: its object, the events of its stream, and its storage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from anydecode.api.generation import Generation
from anydecode.server.chat_run import ChatRun
from anydecode.server.database import StoreError
from anydecode.server.errors import api_error
from anydecode.server.events import compact
from anydecode.server.large import build
from anydecode.server.logprobs import chat_entries
from anydecode.server.logs import log
from anydecode.server.protocol import ResponsesRequest
from anydecode.server.responses.items import unread_fields
from anydecode.server.responses.output import Output, StreamEvent
from anydecode.server.responses.request import num_logprobs, unread_tool_fields
from anydecode.server.responses.store import Item, ResponseStore
from anydecode.server.service import Service, extension

#: Reasons for the end of an answer that is incomplete, in `incomplete_details`.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass
class Storage:
    """Where a response is stored.

    Attributes:
        store: The store; None for a response that is not stored.
        tenant: The namespace of the API key.
        items: The input items, with those of earlier responses.
        events: The events of the stream so far, if they are to be stored with the response.
    """

    store: ResponseStore | None
    tenant: str | None
    items: list[Item]
    events: list[bytes] = field(default_factory=list)

    async def put(self, response: dict[str, Any], last_event: bytes = b"") -> bool:
        """Store `response`. Returns whether there is room for it.

        Args:
            response: The response object.
            last_event: The last event of its stream, which is stored with `events`.

        Raises:
            StoreError: The store cannot be written.
        """
        if self.store is None:
            return False
        events = [*self.events, last_event] if self.events else []
        return await self.store.put(self.tenant, response, self.items, events)

    async def put_failure(self, response: dict[str, Any]) -> None:
        """Replace what is stored of a response that cannot be stored."""
        error = {"code": "server_error", "message": "the response could not be stored"}
        self.items, self.events = [], []
        await self.put({**response, "output": [], "status": "failed", "error": error})


class ResponseRun:
    """The run of one response.

    Args:
        service: The served model.
        body: The request.
        chat_run: Its run.
        echo: The fields of the response object that repeat the request.
        storage: Where the response is stored.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        chat_run: ChatRun,
        echo: dict[str, Any],
        storage: Storage,
    ) -> None:
        self.service = service
        self.body = body
        self.chat_run = chat_run
        self.storage = storage
        self.id = f"resp_{uuid4().hex}"
        self._created = int(time.time())
        self._echo = {**echo, "store": storage.store is not None}
        self._output = Output()
        self._num_events = 0

    async def response(self, generation: Generation) -> dict[str, Any]:
        """The response of a finished generation that was not streamed; stores it."""

        def finished() -> dict[str, Any]:
            self._add_logprobs()
            for event in self.chat_run.events(0, generation):
                list(self._output.push(event))
            list(self._output.end(generation.finish_reason not in _INCOMPLETE))
            return self._finished(generation)

        response = await build(self.chat_run.run.num_values, finished)
        await self._end(response)
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the stream, in OpenAI's order, after the run has been entered. An error of
        the run is reported by the last two. The response is stored before the last one."""
        status = "queued" if self.body.background else "in_progress"
        yield self._encode({"type": "response.created", "response": self.snapshot(status)})
        if self.body.background:
            yield self._encode({"type": "response.queued", "response": self.snapshot(status)})
        yield self._encode({"type": "response.in_progress", "response": self.snapshot()})
        try:
            async for _, events, _ in self.chat_run.stream():
                self._add_logprobs()
                for event in events:
                    for one in self._output.push(event):
                        yield self._encode(one)
            [generation] = self.chat_run.run.generations()
            for one in self._output.end(generation.finish_reason not in _INCOMPLETE):
                yield self._encode(one)
            finish = partial(self._finished, generation)
            response = await build(self.chat_run.run.num_values, finish)
        except Exception as error:
            failure = api_error(error)
            if failure.status >= 500 and failure is not error:
                log.exception("a response failed")
            code = failure.code or "server_error"
            fields = {"code": code, "message": failure.message, "param": failure.param}
            yield self._encode({"type": "error", **fields})
            response = self.failed(failure.message)
        yield await self._end(response)

    async def stop(self, error: str | None) -> bytes:
        """Store the response of a run that was cancelled, which failed if there is an `error`.
        Returns the last event of its stream."""
        self._output.stop()
        return await self._end(self.snapshot("cancelled") if error is None else self.failed(error))

    def snapshot(self, status: str = "in_progress") -> dict[str, Any]:
        """The response object before the end."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "model": self.body.model or self.service.settings.name,
            "output": self._output.to_list(),
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
        }

    def failed(self, message: str) -> dict[str, Any]:
        """The response object after an error."""
        self._output.stop()
        error = {"code": "server_error", "message": message}
        return {**self.snapshot("failed"), "error": error}

    def _finished(self, generation: Generation) -> dict[str, Any]:
        reason = _INCOMPLETE.get(generation.finish_reason)
        is_complete, details = reason is None, None if reason is None else {"reason": reason}
        return {
            **self.snapshot("completed" if is_complete else "incomplete"),
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": details,
            "usage": self._usage(),
            "anydecode": self._extension(generation),
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.chat_run.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        llm = self.service.llm
        is_cached = llm.resources.prefix_cache and llm.model.spec.causal
        written = counts["prompt_tokens"] - cached if is_cached else 0
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }

    def _extension(self, generation: Generation) -> dict[str, Any]:
        fields = extension([generation], self.service.tokenizer, self.body)
        ignored = [
            *fields.pop("ignored", []),
            *(f"input.{name}" for name in unread_fields(self.body.input)),
            *unread_tool_fields(self.body.tools),
        ]
        if self.body.top_logprobs and num_logprobs(self.body) is None:
            ignored.append("top_logprobs")
        if self.body.store and self.storage.store is None:
            ignored.append("store")
        return {**fields, "ignored": sorted(ignored)} if ignored else fields

    def _add_logprobs(self) -> None:
        if num_logprobs(self.body) is None:
            return
        found = self.chat_run.content_logprobs(0)
        entries = chat_entries([entry for _, entry in found], self.service.tokenizer)
        for (num_others, _), entry in zip(found, entries, strict=True):
            self._output.add_logprobs(num_others, entry)

    async def _end(self, response: dict[str, Any]) -> bytes:
        """Store a response that has ended. Returns the last event of its stream."""
        number, kept = self._num_events, _without_trace(response)
        is_stored = False
        with suppress(StoreError):
            is_stored = await self.storage.put(kept, last_event(kept, number))
        if not is_stored and response["store"]:
            response["store"] = False
            if self.body.background:
                with suppress(StoreError):
                    await self.storage.put_failure(response)
        return last_event(response, number)

    def _encode(self, event: StreamEvent) -> bytes:
        self._num_events += 1
        return _encode(event, self._num_events - 1)


def last_event(response: dict[str, Any], number: int) -> bytes:
    """The event that ends the stream of a response, with its number."""
    # OpenAI's streams have no event for cancelled responses.
    kind = "incomplete" if response["status"] == "cancelled" else response["status"]
    return _encode({"type": f"response.{kind}", "response": response}, number)


def _encode(event: StreamEvent, number: int) -> bytes:
    body = compact({**event, "sequence_number": number})
    return f"event: {event['type']}\ndata: {body}\n\n".encode()


def _without_trace(response: dict[str, Any]) -> dict[str, Any]:
    """A response as it is stored: a trace is part of the answer only."""
    if "anydecode" not in response:
        return response
    fields = response["anydecode"].items()
    kept = {name: value for name, value in fields if not name.startswith("trace")}
    return {**response, "anydecode": kept}
