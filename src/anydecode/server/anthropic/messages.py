"""The endpoints `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.generation import Generation
from anydecode.constraints.tools.stream import Event
from anydecode.server.anthropic.prompts import translate
from anydecode.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from anydecode.server.chat_run import ChatRun, render_tokens, start_chat
from anydecode.server.errors import ApiError
from anydecode.server.events import EventStream, compact
from anydecode.server.large import build, json_response
from anydecode.server.options import adapter_of
from anydecode.server.protocol import ChatRequest
from anydecode.server.service import Service, usage
from anydecode.server.translation import arguments_object, extension_of

PATH = "/v1/messages"
#: The signature of all reasoning. It is not checked when the reasoning is sent back.
SIGNATURE = "unsigned"
#: Reasons for the end of an answer, by those of `ChatRun.finish_reason`.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "content_filter": "refusal"}


async def count_tokens(service: Service, body: CountTokensRequest, http: HttpRequest) -> Response:
    """Count the tokens of a prompt."""
    request, _ = translate(body, service.tokenizer.chat_template)
    adapter_of(body.model, service.llm, service.settings)
    tokens = await render_tokens(service, request, http.scope["state"])
    return JSONResponse({"input_tokens": len(tokens)})


async def message(service: Service, body: MessagesRequest, http: HttpRequest) -> Response:
    """Generate the next message of a conversation, as one response or as a stream of events."""
    request, ignored = translate(body, service.tokenizer.chat_template)
    is_streamed = bool(body.stream)
    chat_run = await start_chat(service, request, http.scope["state"], streamed=is_streamed)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    answer = _MessageAnswer(service, request, ignored, chat_run, shows_thinking)
    run = chat_run.run
    if is_streamed:
        stall_seconds = service.settings.stall_seconds
        return EventStream(run, answer.events(), stall_seconds, _encode_failure)
    async with run:
        (generation,) = await run.wait_for_generations(http.receive)
    return await json_response(run.num_values, lambda: answer.response(generation))


class _MessageAnswer:
    """Builds the response object, or the events of its stream."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        ignored: list[str],
        chat_run: ChatRun,
        shows_thinking: bool,
    ) -> None:
        self.service = service
        self.request = request
        self.ignored = ignored
        self.chat_run = chat_run
        self.shows_thinking = shows_thinking
        self._head = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": request.model or service.settings.name,
        }

    def response(self, generation: Generation) -> dict[str, Any]:
        """The response object of a finished generation, without streaming."""
        return {
            **self._head,
            "content": self._content(self.chat_run.events(0, generation)),
            **self._end(),
            "usage": _usage(self.chat_run.usage()),
            "anydecode": self._extension(generation),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the stream, in Anthropic's order."""
        blocks = _BlockEvents(self.shows_thinking)
        has_started = False
        async for _, events, _ in self.chat_run.stream():
            if not has_started:  # the prompt has been computed, so its usage is known
                has_started = True
                end = {"stop_reason": None, "stop_sequence": None}
                counts = _usage(usage(self.chat_run.run))
                started: dict[str, Any] = {**self._head, "content": [], **end, "usage": counts}
                yield _event("message_start", message=started)
                yield _event("ping")
            for event in blocks.push(events):
                yield event
        for event in blocks.end():
            yield event
        run = self.chat_run.run
        fields = await build(run.num_values, lambda: self._extension(run.generations()[0]))
        counts = _usage(await build(run.num_values, self.chat_run.usage))
        yield _event("message_delta", delta=self._end(), usage=counts, anydecode=fields)
        yield _event("message_stop")

    def _content(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for kind, value in _merged(events):
            if kind == "content":
                blocks.append(_text_block(value))
            elif kind == "reasoning":
                text = value if self.shows_thinking else ""
                blocks.append(_thinking_block(text, SIGNATURE))
            elif kind == "call":
                blocks.append(_tool_use_block(value))
            elif kind == "arguments":
                blocks[-1]["input"] = arguments_object(value)
        return blocks

    def _end(self) -> dict[str, Any]:
        """Why the answer ended."""
        reason = self.chat_run.finish_reason(0)
        if (stop_sequence := self.chat_run.stop_string(0)) is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_sequence}
        if reason == "length":
            request = self.chat_run.run.requests[0]
            is_full = request.limit < (self.request.max_tokens or 0)
            name = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            name = _STOP_REASONS[reason]
        return {"stop_reason": name, "stop_sequence": None}

    def _extension(self, generation: Generation) -> dict[str, Any]:
        return extension_of([generation], self.service, self.request, self.ignored)


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's counts from OpenAI's. The input tokens are those that were computed."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    fields: dict[str, Any] = {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
    if (details := counts.get("completion_tokens_details")) is not None:
        fields["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return fields


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    """`events` without their ends, and with one event for adjacent texts of one kind."""
    pending: tuple[str, list[str]] | None = None
    for kind, value in events:
        if pending is not None and (pending[0] != kind or kind == "call"):
            yield pending[0], "".join(pending[1])
            pending = None
        if pending is not None:
            pending[1].append(value)
        elif kind != "end":
            pending = (kind, [value])
    if pending is not None:
        yield pending[0], "".join(pending[1])


class _BlockEvents:
    """Turns the events of an answer into those of content blocks."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None  # the kind of the open block

    def push(self, events: Iterable[Event]) -> Iterator[bytes]:
        """Yield the events of blocks that `events` open, extend and close."""
        for kind, value in events:
            if kind == "content":
                if self._open != kind:
                    yield from self._start(kind, _text_block(""))
                yield self._delta({"type": "text_delta", "text": value})
            elif kind == "reasoning":
                if self._open != kind:
                    yield from self._start(kind, _thinking_block("", ""))
                if self._shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": value})
            elif kind == "call":
                yield from self._start(kind, _tool_use_block(value))
            elif kind == "arguments":
                yield self._delta({"type": "input_json_delta", "partial_json": value})
            else:
                yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Yield the events that close the open block, if there is one."""
        if self._open == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.end()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _tool_use_block(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": name, "input": {}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {compact({'type': kind, **fields})}\n\n".encode()


def _encode_failure(error: ApiError) -> bytes:
    return _event("error", error=error.to_dict(PATH)["error"])
