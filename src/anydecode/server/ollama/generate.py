"""The endpoints `/api/chat` and `/api/generate`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from functools import partial
from time import perf_counter
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.generation import Generation
from anydecode.server import logprobs
from anydecode.server.chat_run import Answer, ChatRun, ToolCall, start_chat
from anydecode.server.completions import with_suffix
from anydecode.server.events import EventStream, compact
from anydecode.server.large import json_response
from anydecode.server.ollama.prompts import chat_form, generate_form, is_zero
from anydecode.server.ollama.protocol import GenerateRequest, GeneratingBody, OllamaChatRequest
from anydecode.server.options import engine_options
from anydecode.server.parsers import Parser
from anydecode.server.protocol import ChatRequest
from anydecode.server.service import Service
from anydecode.server.tools import constraint_factory, constraint_field, with_field
from anydecode.server.translation import arguments_object, extension_of

#: A part of an answer, as the fields of a response or of a line of a stream.
Shape = Callable[[Answer], dict[str, Any]]


async def chat(service: Service, body: OllamaChatRequest, http: HttpRequest) -> Response:
    """Generate the next message of a conversation, as lines of JSON or one response."""
    start = perf_counter()
    request, ignored = chat_form(body, service)
    if not body.messages:
        return _without_prompt(body, request.model, _message, "load")
    chat_run = await start_chat(service, request, http.scope["state"], **_run_options(body))
    return await _OllamaAnswer(service, body, request, ignored, chat_run, _message, start).send(
        http
    )


async def generate(service: Service, body: GenerateRequest, http: HttpRequest) -> Response:
    """Answer a prompt as lines of JSON or one response. A `raw` one is continued; with a `suffix`,
    the text between them is generated."""
    start = perf_counter()
    request, ignored = generate_form(body, service)
    if not body.prompt:
        return _without_prompt(body, request.model, _response, "load")
    prepare = start_chat if body.is_rendered else partial(_start_raw, suffix=body.suffix)
    chat_run = await prepare(service, request, http.scope["state"], **_run_options(body))
    return await _OllamaAnswer(service, body, request, ignored, chat_run, _response, start).send(
        http
    )


def _run_options(body: GeneratingBody) -> dict[str, Any]:
    """The options of `start_chat` and `_start_raw`. Answers are streamed by default."""
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return {"num_logprobs": num_logprobs, "streamed": body.stream is not False}


async def _start_raw(
    service: Service,
    request: ChatRequest,
    state: dict[str, Any],
    *,
    suffix: str | None,
    num_logprobs: int | None,
    streamed: bool,
) -> ChatRun:
    """Prepare the continuation of the text of the only message, up to `suffix` if given, without a
    template."""
    options = engine_options(request, service.llm, service.settings, state["namespace"])
    if request.max_tokens is None:
        options["max_tokens"] = service.llm.max_length
    options["logprobs"] = num_logprobs
    make_constraint = constraint_factory(request.response_format, request.structured_outputs)
    if make_constraint is not None:
        with with_field(constraint_field(request.structured_outputs)):
            options["constraint"] = await service.preparation.constraint(state, make_constraint)
    prompts: list[Any] = [request.messages[0].content]
    if suffix:
        prompts, ends = await with_suffix(service, state, prompts, suffix)
        options["stop_tokens"] = [*(request.stop_tokens or ()), *ends]
    run = await service.run(prompts, options, state, streamed=streamed)
    return ChatRun(service, run, partial(Parser, None, None))


def _message(part: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.content or ""}
    if part.reasoning is not None:
        message["thinking"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [_tool_call(call) for call in part.calls]
    return {"message": message}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = arguments_object(call.arguments)
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return {"id": call.id, "function": function}


def _response(part: Answer) -> dict[str, Any]:
    thinking = {} if part.reasoning is None else {"thinking": part.reasoning}
    return {"response": part.content or "", **thinking}


def is_unloading(body: OllamaChatRequest | GenerateRequest) -> bool:
    """Whether a request only unloads the model: without a prompt, to be kept for no time."""
    prompt = body.messages if isinstance(body, OllamaChatRequest) else body.prompt
    return not prompt and is_zero(body.keep_alive)


def unloaded(body: OllamaChatRequest | GenerateRequest, name: str) -> Response:
    """The answer to a request that unloads the model called `name`."""
    shape = _message if isinstance(body, OllamaChatRequest) else _response
    return _without_prompt(body, name, shape, "unload")


def _without_prompt(body: GeneratingBody, name: str | None, shape: Shape, reason: str) -> Response:
    """The answer to a request without a prompt, by which clients load and unload a model."""
    end = {"done": True, "done_reason": reason}
    return JSONResponse({**_head(body, name), **shape(Answer()), **end})


def _head(body: GeneratingBody, name: str | None) -> dict[str, Any]:
    return {
        "model": body.model or name,
        "created_at": timestamp(datetime.now(timezone.utc)),
    }


def timestamp(when: datetime) -> str:
    """A time in UTC as Ollama writes it."""
    return when.isoformat().replace("+00:00", "Z")


class _OllamaAnswer:
    """Builds the response object, or the lines of its stream."""

    def __init__(
        self,
        service: Service,
        body: GeneratingBody,
        request: ChatRequest,
        ignored: list[str],
        chat_run: ChatRun,
        shape: Shape,
        start: float,
    ) -> None:
        self.service = service
        self.body = body
        self.request = request
        self.ignored = ignored
        self.chat_run = chat_run
        self.shape = shape
        self.start = start
        self._num_logprobs_sent = 0

    async def send(self, http: HttpRequest) -> Response:
        """The response, streamed unless the request says otherwise."""
        run = self.chat_run.run
        if self.body.stream is not False:
            return EventStream(
                run,
                self.lines(),
                self.service.settings.stall_seconds,
                lambda error: _line(error.to_dict(http.scope["path"])),
                "application/x-ndjson",
            )
        async with run:
            (generation,) = await run.wait_for_generations(http.receive)

        def response() -> dict[str, Any]:
            answer = self.chat_run.answer(0, generation)
            return {**self._part(answer), **self._end(generation)}

        return await json_response(run.num_values, response)

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the stream."""
        call: ToolCall | None = None  # whose arguments are not complete
        num_calls = 0
        async for _, events, ended in self.chat_run.stream():
            parts = []
            for kind, value in events:
                if call is not None and kind != "arguments":
                    parts.append(Answer(calls=[call]))
                    call = None
                if kind == "content":
                    parts.append(Answer(content=value))
                elif kind == "reasoning":
                    parts.append(Answer(reasoning=value))
                elif kind == "call":
                    call = ToolCall(value, index=num_calls)
                    num_calls += 1
                elif kind == "arguments" and call is not None:
                    call.arguments += value
            if ended and call is not None:  # it was cut
                parts.append(Answer(calls=[call]))
            for part in parts:
                yield _line({**self._part(part), "done": False})
        (generation,) = self.chat_run.run.generations()
        yield _line({**self._part(Answer()), **self._end(generation)})

    def _part(self, part: Answer) -> dict[str, Any]:
        """The fields of a part, with the log-probabilities of the tokens since the last one."""
        fields = {**_head(self.body, self.request.model), **self.shape(part)}
        if self.body.logprobs:
            sequence = self.chat_run.run.requests[0].jobs[0].sequence
            entries = logprobs.generated(sequence, self._num_logprobs_sent)
            self._num_logprobs_sent += len(entries)
            if entries:
                fields["logprobs"] = logprobs.chat_entries(entries, self.service.tokenizer)
        return fields

    def _end(self, generation: Generation) -> dict[str, Any]:
        """The fields of the last line. Durations are in nanoseconds."""
        stats = generation.stats
        is_cut = generation.finish_reason == "length"
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": _nanoseconds(perf_counter() - self.start),
            "load_duration": 0,
            "prompt_eval_count": stats.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.time_to_first_token),
            "eval_count": stats.num_tokens,
            "eval_duration": _nanoseconds(stats.seconds - stats.time_to_first_token),
            "anydecode": extension_of([generation], self.service, self.request, self.ignored),
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(fields: dict[str, Any]) -> bytes:
    return compact(fields).encode() + b"\n"
