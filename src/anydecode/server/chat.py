"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from anydecode.api.generation import Generation
from anydecode.constraints.tools.stream import Event
from anydecode.server import logprobs
from anydecode.server.chat_run import ChatRun, ToolCall, start_chat
from anydecode.server.errors import ApiError
from anydecode.server.events import DONE, EventStream, compact, encode_event
from anydecode.server.large import build, json_response
from anydecode.server.protocol import ChatRequest
from anydecode.server.service import Service, canvas, chunk_usage, extension


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> Response:
    """Generate the next message of a conversation, as one response or as a stream."""
    logprobs.check_prompt_logprobs(body)
    chat_run = await start_chat(
        service,
        body,
        http.scope["state"],
        num_logprobs=_num_top_logprobs(body),
        streamed=bool(body.stream),
    )
    answer = _ChatAnswer(service, body, chat_run)
    run = chat_run.run
    if body.stream:
        return EventStream(run, answer.chunks(), service.settings.stall_seconds)
    async with run:
        generations = await run.wait_for_generations(http.receive)
    return await json_response(run.num_values, lambda: answer.response(generations))


def _num_top_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


class _ChatAnswer:
    """Builds the response object, or the chunks of its stream."""

    def __init__(self, service: Service, body: ChatRequest, chat_run: ChatRun) -> None:
        self.service = service
        self.body = body
        self.chat_run = chat_run
        self.run = chat_run.run
        count = len(self.run.choices)
        self._num_calls = [0] * count
        self._num_logprobs_sent = [0] * count
        self._num_passes_sent = [0] * count

    def response(self, generations: list[Generation]) -> dict[str, Any]:
        """The response object of finished generations, without streaming."""
        return {
            **self.service.head("chat.completion", "chatcmpl", self.body.model),
            "choices": [self._choice(index, one) for index, one in enumerate(generations)],
            "usage": self.chat_run.usage(),
            **self._prompt_logprobs(),
            "anydecode": extension(generations, self.service.tokenizer, self.body),
        }

    def _prompt_logprobs(self) -> dict[str, Any]:
        if self.body.prompt_logprobs is None:
            return {}
        entries = self.run.requests[0].prompt_logprobs
        return {"prompt_logprobs": logprobs.prompt_entries(entries, self.service.tokenizer)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of the stream."""
        head = self.service.head("chat.completion.chunk", "chatcmpl", self.body.model)
        stream_options = self.body.stream_options
        has_counts = stream_options is not None and stream_options.continuous_usage_stats
        opening = self._opening(head)
        role = {"role": "assistant", "content": ""}
        yield _chunk(opening, 0, role, None, None)
        num_begun, num_ended = 1, 0
        async for index, events, ended in self.chat_run.stream():
            if has_counts:
                opening = self._opening(head)
            if index == num_begun:
                num_begun += 1
                yield _chunk(opening, index, role, None, None)
            for delta, logprobs_object in self._deltas(index, events):
                yield _chunk(opening, index, delta, logprobs_object, None)
            request, number = self.run.choices[index]
            trace = request.jobs[number].sequence.trace
            positions, self._num_passes_sent[index] = canvas(
                trace, self._num_passes_sent[index], self.service.tokenizer
            )
            if positions is not None:
                yield _chunk(opening, index, {}, None, None, {"anydecode": {"canvas": positions}})
            num_ended += ended
            if ended and num_ended < len(self.run.choices):
                yield _chunk(opening, index, {}, None, self.chat_run.finish_reason(index))
            last = index
        fields = await build(
            self.run.num_values,
            lambda: extension(self.run.generations(), self.service.tokenizer, self.body),
        )
        reason = self.chat_run.finish_reason(last)
        yield _chunk(opening, last, {}, None, reason, {"anydecode": fields})
        if stream_options is not None and stream_options.include_usage:
            counts = await build(self.run.num_values, self.chat_run.usage)
            yield encode_event({**head, "choices": [], "usage": counts})
        yield DONE

    def _opening(self, head: dict[str, Any]) -> bytes:
        """The start of a chunk's JSON, up to its choices."""
        return compact({**head, **chunk_usage(self.run, self.body.stream_options)})[:-1].encode()

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        answer = self.chat_run.answer(index, generation)
        content = answer.content
        if content is None and not answer.calls:
            content = ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_tool_call(call) for call in answer.calls]
        logprobs_object = None
        if self.body.logprobs:
            request, number = self.run.choices[index]
            generated = logprobs.generated(request.jobs[number].sequence)
            logprobs_object = {"content": logprobs.chat_entries(generated, self.service.tokenizer)}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_object,
            "finish_reason": self.chat_run.finish_reason(index),
        }

    def _deltas(self, index: int, events: list[Event]) -> list[tuple[dict[str, Any], Any]]:
        """The deltas of new events, each with its log-probabilities or None."""
        deltas: list[dict[str, Any]] = []
        for kind, value in events:
            if kind == "content":
                deltas.append({"content": value})
            elif kind == "reasoning":
                deltas.append({"reasoning_content": value})
            elif kind == "call":
                call = {"index": self._num_calls[index], **_tool_call(ToolCall(value))}
                self._num_calls[index] += 1
                deltas.append({"tool_calls": [call]})
            elif kind == "arguments":
                call = {"index": self._num_calls[index] - 1, "function": {"arguments": value}}
                deltas.append({"tool_calls": [call]})
        if not self.body.logprobs:
            return [(delta, None) for delta in deltas]
        request, number = self.run.choices[index]
        generated = logprobs.generated(
            request.jobs[number].sequence, self._num_logprobs_sent[index]
        )
        if not generated:
            return [(delta, None) for delta in deltas]
        self._num_logprobs_sent[index] += len(generated)
        logprobs_object = {"content": logprobs.chat_entries(generated, self.service.tokenizer)}
        first = deltas[0] if deltas else {"content": ""}
        return [(first, logprobs_object), *((delta, None) for delta in deltas[1:])]


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


_CONTENT_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _chunk(
    opening: bytes,
    index: int,
    delta: dict[str, Any],
    logprobs_object: Any,
    reason: str | None,
    extra: dict[str, Any] | None = None,
) -> bytes:
    plain = logprobs_object is None and reason is None and extra is None
    if plain and len(delta) == 1 and "content" in delta:
        # The common case: only the text needs encoding.
        text = compact(delta["content"]).encode()
        middle = b',"choices":[{"index":%d,"delta":{"content":' % index
        return b"data: " + opening + middle + text + _CONTENT_END
    choice = {"index": index, "delta": delta, "logprobs": logprobs_object, "finish_reason": reason}
    body = compact({"choices": [choice], **(extra or {})})
    return b"data: " + opening + b"," + body[1:].encode() + b"\n\n"
