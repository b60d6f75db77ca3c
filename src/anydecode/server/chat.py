"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.generation import Generation
from anydecode.api.request import Request
from anydecode.constraints.tools.tool_calls import parse_answer
from anydecode.server import logprobs
from anydecode.server.errors import ApiError
from anydecode.server.events import DONE, EventStream, compact, encode_event
from anydecode.server.options import engine_options
from anydecode.server.parsers import Parser
from anydecode.server.prompts import conversation, effort_variables, with_tools
from anydecode.server.protocol import ChatRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, canvas, extension, usage
from anydecode.server.tools import (
    answer_schema_of,
    constraint_factory,
    json_options,
    parameters_of,
    select_tools,
    tool_constraint,
)


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> Response:
    """Generate the next message of a conversation, as one response or as a stream."""
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    limits = (body.max_completion_tokens, body.max_tokens, service.llm.max_length)
    options["max_tokens"] = next(limit for limit in limits if limit is not None)
    options["logprobs"] = _num_top_logprobs(body)
    tools, required = select_tools(body.tools, body.tool_choice)
    call_format = service.tool_format
    if tools and call_format is None:
        raise ApiError(
            400,
            "tools need a tool parser, and this server has none; start it with --tool-parser",
            param="tools",
        )
    text = await _render_prompt(service, body, state, bool(tools))
    make_constraint: Callable[[], Any] | None = None
    if tools:
        assert call_format is not None
        answer_schema = answer_schema_of(body.response_format, body.structured_outputs)
        make_constraint = partial(
            tool_constraint,
            tools,
            call_format,
            required=required,
            parallel=body.parallel_tool_calls is not False,
            answer_schema=answer_schema,
            options=json_options(body.structured_outputs),
        )
    else:
        make_constraint = constraint_factory(body.response_format, body.structured_outputs)
    if make_constraint is not None:
        constraint = await service.preparation.constraint(state, make_constraint)
        options["constraint"] = service.after_reasoning(constraint, text[-64:])
    tokens = await service.preparation.encode(state, text, special=False)
    run = await service.run([tokens], options, state, streamed=body.stream)
    parse = None
    if tools:
        assert call_format is not None
        parse = partial(
            parse_answer,
            call_format=call_format,
            schemas=parameters_of(tools),
            has_answer=not required and answer_schema is not None,
        )
    answer = _ChatAnswer(service, body, run, partial(service.parser, text[-64:], parse))
    if body.stream:
        return EventStream(run, answer.chunks(), service.settings.stall_seconds)
    async with run:
        generations = await run.wait_for_generations(http.receive)
    return JSONResponse(answer.response(generations))


def _num_top_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


async def _render_prompt(
    service: Service, body: ChatRequest, state: dict[str, Any], tools: bool
) -> str:
    """The conversation, rendered with the chat template."""
    messages = conversation(body.messages)
    variables = effort_variables(body.reasoning_effort, service.tokenizer.chat_template)
    variables.update(body.chat_template_kwargs or {})
    variables.pop("add_generation_prompt", None)
    if tools and body.tools and service.tool_format is not None:
        messages, tool_variables = with_tools(
            messages,
            body.tools,
            service.tokenizer.chat_template,
            service.tool_format.render([("function", {"argument": "value"})]),
        )
        variables.update(tool_variables)
    return await service.preparation.render(state, messages, variables)


class _ChatAnswer:
    """Builds the response object, or the chunks of its stream."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        run: ServerRun,
        new_parser: Callable[[], Parser],
    ) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._new_parser = new_parser
        self._parsers = [self._new_parser() for _ in run.choices]
        self._num_calls = [0] * len(run.choices)
        self._num_logprobs_sent = [0] * len(run.choices)
        self._num_passes_sent = [0] * len(run.choices)

    def response(self, generations: list[Generation]) -> dict[str, Any]:
        """The response object of finished generations, without streaming."""
        return {
            **self.service.head("chat.completion", "chatcmpl"),
            "choices": [self._choice(index, one) for index, one in enumerate(generations)],
            "usage": usage(self.run, self._new_parser),
            "anydecode": extension(generations, self.service.tokenizer, self.body),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of the stream."""
        head = self.service.head("chat.completion.chunk", "chatcmpl")
        include_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        shared = {**head, "usage": None} if include_usage else head
        opening = compact(shared)[:-1].encode()
        choices = self.run.choices  # constant: `first_finish` is not streamed
        active = set(range(len(choices)))
        for index in sorted(active):
            yield _chunk(opening, index, {"role": "assistant", "content": ""}, None, None)
        while active:
            await self.run.wait_for_progress()
            for index in sorted(active):
                request, number = choices[index]
                ended = self._is_done(request, number)
                for delta, logprobs_object in self._deltas(index, request, number, ended):
                    yield _chunk(opening, index, delta, logprobs_object, None)
                trace = request.jobs[number].sequence.trace
                positions, self._num_passes_sent[index] = canvas(
                    trace, self._num_passes_sent[index], self.service.tokenizer
                )
                if positions is not None:
                    yield _chunk(
                        opening, index, {}, None, None, {"anydecode": {"canvas": positions}}
                    )
                if ended:
                    active.discard(index)
                    if active or not self.run.done:
                        yield _chunk(opening, index, {}, None, self._finish_reason(index))
                    else:
                        last = index
        fields = extension(self.run.generations(), self.service.tokenizer, self.body)
        yield _chunk(opening, last, {}, None, self._finish_reason(last), {"anydecode": fields})
        if include_usage:
            yield encode_event({**head, "choices": [], "usage": usage(self.run, self._new_parser)})
        yield DONE

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        parts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for kind, value in self._parsers[index].push(generation.text, final=True):
            if kind == "call":
                calls.append(self._tool_call(index, value))
            elif kind == "arguments":
                calls[-1]["function"]["arguments"] += value
            elif kind != "end":
                parts[kind] = parts.get(kind, "") + value
        message["content"] = parts.get("content", None if calls else "")
        if "reasoning" in parts:
            message["reasoning_content"] = parts["reasoning"]
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        logprobs_object = None
        if self.body.logprobs:
            request, number = self.run.choices[index]
            generated = logprobs.generated(request.jobs[number].sequence)
            logprobs_object = {"content": logprobs.chat_entries(generated, self.service.tokenizer)}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_object,
            "finish_reason": self._finish_reason(index),
        }

    def _is_done(self, request: Request, number: int) -> bool:
        job = request.jobs[number]
        if job.done and job.error is not None:
            request.generation()  # raises the error
        return job.done

    def _deltas(
        self, index: int, request: Request, number: int, ended: bool
    ) -> list[tuple[dict[str, Any], Any]]:
        """The deltas since the last call, each with its log-probabilities or None."""
        parser: Parser = self._parsers[index]
        deltas: list[dict[str, Any]] = []
        for kind, value in parser.push(request.take_text(number), final=ended):
            if kind == "content":
                deltas.append({"content": value})
            elif kind == "reasoning":
                deltas.append({"reasoning_content": value})
            elif kind == "call":
                deltas.append({"tool_calls": [self._tool_call(index, value)]})
            elif kind == "arguments":
                number_of_call = self._num_calls[index] - 1
                call = {"index": number_of_call, "function": {"arguments": value}}
                deltas.append({"tool_calls": [call]})
        if not self.body.logprobs:
            return [(delta, None) for delta in deltas]
        generated = logprobs.generated(
            request.jobs[number].sequence, self._num_logprobs_sent[index]
        )
        if not generated:
            return [(delta, None) for delta in deltas]
        self._num_logprobs_sent[index] += len(generated)
        logprobs_object = {"content": logprobs.chat_entries(generated, self.service.tokenizer)}
        first = deltas[0] if deltas else {"content": ""}
        return [(first, logprobs_object), *((delta, None) for delta in deltas[1:])]

    def _tool_call(self, index: int, name: str) -> dict[str, Any]:
        """The start of a call: its arguments follow."""
        number = self._num_calls[index]
        self._num_calls[index] += 1
        function = {"name": name, "arguments": ""}
        identifier = f"call_{uuid4().hex[:24]}"
        return {"index": number, "id": identifier, "type": "function", "function": function}

    def _finish_reason(self, index: int) -> str:
        request, number = self.run.choices[index]
        reason = request.jobs[number].sequence.finish_reason or "stop"
        return "tool_calls" if self._num_calls[index] and reason == "stop" else reason


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
