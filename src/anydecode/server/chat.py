"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.engine.generation import Generation
from anydecode.engine.request import Request
from anydecode.server import logprobs
from anydecode.server.errors import ApiError
from anydecode.server.events import DONE, EventStream, compact, data
from anydecode.server.options import engine_options
from anydecode.server.parsers import Parser, ToolFormat
from anydecode.server.prompts import conversation, effort_variables, with_tools
from anydecode.server.protocol import ChatRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, canvas, extension, usage
from anydecode.server.tools import (
    chosen_tools,
    format_constraint,
    format_schema,
    tool_constraint,
)


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation, whole or as a stream."""
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    limits = (body.max_completion_tokens, body.max_tokens, service.llm.max_length)
    options["max_tokens"] = next(limit for limit in limits if limit is not None)
    options["logprobs"] = _wanted_logprobs(body)
    tools, required = chosen_tools(body.tools, body.tool_choice)
    style = service.tool_format
    if tools and style is None:
        raise ApiError(400, "this server has no tool parser", param="tools")
    text = _rendered(service, body, bool(tools))
    constrain = None
    if tools:
        assert style is not None
        answer = format_schema(body.response_format)
        parallel = body.parallel_tool_calls is not False

        def constrain() -> Any:
            constraint = tool_constraint(
                tools, style, required=required, parallel=parallel, answer=answer
            )
            return service.after_reasoning(constraint, text[-64:])

    elif format_schema(body.response_format) is not None:

        def constrain() -> Any:
            return service.after_reasoning(format_constraint(body.response_format), text[-64:])

    tokens = service.tokenizer.encode(text, special=False)
    run = await service.run([tokens], options, state, constrain=constrain, streamed=body.stream)
    answer_of = _Answer(service, body, run, text[-64:], bool(tools))
    if body.stream:
        return EventStream(run, answer_of.chunks(), service.settings.stall_seconds)
    async with run:
        generations = await run.finished(http.receive)
    return JSONResponse(answer_of.whole(generations))


def _wanted_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def _rendered(service: Service, body: ChatRequest, tools: bool) -> str:
    """The conversation as the model reads it."""
    messages = conversation(body.messages)
    variables = effort_variables(body.reasoning_effort, service.tokenizer.chat_template)
    variables.update(body.chat_template_kwargs or {})
    variables.pop("add_generation_prompt", None)
    if tools and body.tools:
        messages, told = with_tools(
            messages, body.tools, service.tokenizer.chat_template, _example(service.tool_format)
        )
        variables.update(told)
    return service.tokenizer.render_chat(messages, **variables)


def _example(style: ToolFormat | None) -> str:
    assert style is not None
    call = f'{{"name": "function", "{style.arguments}": {{...}}}}'
    return style.opening + (f"[{call}]" if style.listed else call) + style.closing


class _Answer:
    """The answer in OpenAI's shape, in one piece or in chunks."""

    def __init__(
        self, service: Service, body: ChatRequest, run: ServerRun, prompt_end: str, tools: bool
    ) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._new_parser = partial(service.parser, prompt_end, tools)
        self._parsers = [self._new_parser() for _ in run.choices]
        self._calls = [0] * len(run.choices)
        self._noted = [0] * len(run.choices)
        self._traced = [0] * len(run.choices)

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """The answer of a request that did not ask for a stream."""
        return {
            **self.service.head("chat.completion", "chatcmpl"),
            "choices": [self._choice(index, one) for index, one in enumerate(generations)],
            "usage": usage(self.run, self._new_parser),
            "anydecode": extension(generations, self.service.tokenizer, self.body),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        head = self.service.head("chat.completion.chunk", "chatcmpl")
        wants_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        shared = {**head, "usage": None} if wants_usage else head
        opening = compact(shared)[:-1].encode()
        choices = self.run.choices  # the same throughout: a race of samples is not streamed
        live = set(range(len(choices)))
        for index in sorted(live):
            yield _chunk(opening, index, {"role": "assistant", "content": ""}, None, None)
        while live:
            await self.run.news()
            for index in sorted(live):
                request, number = choices[index]
                ended = self._ended(request, number)
                for delta, noted in self._deltas(index, request, number, ended):
                    yield _chunk(opening, index, delta, noted, None)
                trace = request.jobs[number].sequence.trace
                positions, self._traced[index] = canvas(
                    trace, self._traced[index], self.service.tokenizer
                )
                if positions is not None:
                    yield _chunk(
                        opening, index, {}, None, None, {"anydecode": {"canvas": positions}}
                    )
                if ended:
                    live.discard(index)
                    if live or not self.run.done:
                        yield _chunk(opening, index, {}, None, self._reason(index))
                    else:
                        last = index
        told = extension(self.run.generations(), self.service.tokenizer, self.body)
        yield _chunk(opening, last, {}, None, self._reason(last), {"anydecode": told})
        if wants_usage:
            yield data({**head, "choices": [], "usage": usage(self.run, self._new_parser)})
        yield DONE

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        parts: dict[str, str] = {}
        calls = []
        for kind, value in self._parsers[index].push(generation.text, final=True):
            if kind == "tool":
                calls.append(self._tool_call(index, value))
            else:
                parts[kind] = parts.get(kind, "") + value
        message["content"] = parts.get("content", None if calls else "")
        if "reasoning" in parts:
            message["reasoning_content"] = parts["reasoning"]
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        notes = None
        if self.body.logprobs:
            request, number = self.run.choices[index]
            said = logprobs.said(request.jobs[number].sequence)
            notes = {"content": logprobs.chat_entries(said, self.service.tokenizer)}
        return {
            "index": index,
            "message": message,
            "logprobs": notes,
            "finish_reason": self._reason(index),
        }

    def _ended(self, request: Request, number: int) -> bool:
        job = request.jobs[number]
        if job.done and job.error is not None:
            request.generation()  # raises what ended it
        return job.done

    def _deltas(
        self, index: int, request: Request, number: int, ended: bool
    ) -> list[tuple[dict[str, Any], Any]]:
        """What has come since the last time."""
        parser: Parser = self._parsers[index]
        deltas: list[dict[str, Any]] = []
        for kind, value in parser.push(request.take_text(number), final=ended):
            if kind == "content":
                deltas.append({"content": value})
            elif kind == "reasoning":
                deltas.append({"reasoning_content": value})
            else:
                deltas.append({"tool_calls": [self._tool_call(index, value)]})
        if not self.body.logprobs:
            return [(delta, None) for delta in deltas]
        said = logprobs.said(request.jobs[number].sequence, self._noted[index])
        if not said:
            return [(delta, None) for delta in deltas]
        self._noted[index] += len(said)
        noted = {"content": logprobs.chat_entries(said, self.service.tokenizer)}
        first = deltas[0] if deltas else {"content": ""}
        return [(first, noted), *((delta, None) for delta in deltas[1:])]

    def _tool_call(self, index: int, call: dict[str, str]) -> dict[str, Any]:
        position = self._calls[index]
        self._calls[index] += 1
        name = f"call_{uuid4().hex[:24]}"
        return {"index": position, "id": name, "type": "function", "function": call}

    def _reason(self, index: int) -> str:
        request, number = self.run.choices[index]
        reason = request.jobs[number].sequence.finish_reason or "stop"
        return "tool_calls" if self._calls[index] and reason == "stop" else reason


_PLAIN_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _chunk(
    opening: bytes,
    index: int,
    delta: dict[str, Any],
    noted: Any,
    reason: str | None,
    further: dict[str, Any] | None = None,
) -> bytes:
    plain = noted is None and reason is None and further is None
    if plain and len(delta) == 1 and "content" in delta:
        # Nearly every token: only its text needs an encoder.
        text = compact(delta["content"]).encode()
        position = b',"choices":[{"index":%d,"delta":{"content":' % index
        return b"data: " + opening + position + text + _PLAIN_END
    choice = {"index": index, "delta": delta, "logprobs": noted, "finish_reason": reason}
    body = compact({"choices": [choice], **(further or {})})
    return b"data: " + opening + b"," + body[1:].encode() + b"\n\n"
