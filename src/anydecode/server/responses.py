"""The endpoint `/v1/responses`, for text. Nothing is stored between requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.generation import Generation
from anydecode.server.errors import ApiError
from anydecode.server.events import EventStream
from anydecode.server.options import engine_options
from anydecode.server.prompts import conversation, effort_variables, response_items
from anydecode.server.protocol import ResponsesRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, extension, usage
from anydecode.server.tools import constraint_factory


async def respond(service: Service, body: ResponsesRequest, http: HttpRequest) -> Response:
    """Generate a response to an input, as one response or as a stream of events."""
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; a response has exactly one answer", param="n")
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    limits = (body.max_output_tokens, body.max_tokens, service.llm.max_length)
    options["max_tokens"] = next(limit for limit in limits if limit is not None)
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = effort_variables(effort, service.tokenizer.chat_template)
    messages = response_items(body.input, body.instructions)
    text = await service.preparation.render(state, conversation(messages), variables)
    response_format = (body.text or {}).get("format")
    if not isinstance(response_format, dict | None):
        raise ApiError(400, f"text.format must be an object, not {response_format!r}", param="text")
    make_constraint = constraint_factory(response_format, body.structured_outputs)
    if make_constraint is not None:
        constraint = await service.preparation.constraint(state, make_constraint)
        options["constraint"] = service.after_reasoning(constraint, text[-64:])
    tokens = await service.preparation.encode(state, text, special=False)
    run = await service.run([tokens], options, state, streamed=body.stream)
    answer = _ResponsesAnswer(service, body, run, text[-64:])
    if body.stream:
        stall_seconds = service.settings.stall_seconds
        return EventStream(run, answer.events(), stall_seconds, answer.encode_failure)
    async with run:
        generations = await run.wait_for_generations(http.receive)
    return JSONResponse(answer.response(generations[0]))


class _ResponsesAnswer:
    """Builds the response object, or the events of its stream."""

    def __init__(self, service: Service, body: ResponsesRequest, run: ServerRun, end: str) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._new_parser = partial(service.parser, end)
        self._parser = self._new_parser()
        head = service.head("response", "resp")
        self._head = {"id": head["id"], "object": "response", "created_at": head["created"]}
        self._item_id = f"msg_{uuid4().hex}"
        self._sequence_number = 0

    def response(self, generation: Generation) -> dict[str, Any]:
        """The response object of a finished generation, without streaming."""
        events = list(self._parser.push(generation.text, final=True))
        text = "".join(value for kind, value in events if kind == "content")
        return self._final_response(generation, text)

    def _final_response(self, generation: Generation, text: str) -> dict[str, Any]:
        counts = usage(self.run, self._new_parser)
        is_truncated = generation.finish_reason == "length"
        status = "incomplete" if is_truncated else "completed"
        return {
            **self._response_object(status, [self._message(text, status)]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            "anydecode": extension([generation], self.service.tokenizer, self.body),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the stream, in OpenAI's order."""
        position = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        started = self._response_object("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        item = {**self._message("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **position, part=_part(""))
        text, ended = "", False
        request = self.run.requests[0]
        while not ended:
            await self.run.wait_for_progress()
            ended = request.done
            if ended:
                self.run.generations()  # raises the error of a failed request
            for kind, value in self._parser.push(request.take_text(), final=ended):
                if kind == "content":
                    text += value
                    yield self._event(
                        "response.output_text.delta", **position, delta=value, logprobs=[]
                    )
        yield self._event("response.output_text.done", **position, text=text, logprobs=[])
        yield self._event("response.content_part.done", **position, part=_part(text))
        done = self._final_response(self.run.generations()[0], text)
        yield self._event("response.output_item.done", output_index=0, item=done["output"][0])
        yield self._event(f"response.{done['status']}", response=done)

    def encode_failure(self, error: ApiError) -> bytes:
        """The events that end a stream after `error`."""
        code = error.code or "server_error"
        fields = {"code": code, "message": error.message}
        response = {**self._response_object("failed", []), "error": fields}
        return self._event("error", **fields, param=error.param) + self._event(
            "response.failed", response=response
        )

    def _response_object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "model": self.service.settings.name,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.instructions,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": self.body.temperature,
            "top_p": self.body.top_p,
            "tool_choice": "none",
            "tools": [],
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
