"""`/v1/responses`, for text. Nothing is stored between requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.engine.generation import Generation
from anydecode.server.errors import ApiError
from anydecode.server.events import EventStream
from anydecode.server.options import engine_options
from anydecode.server.prompts import conversation, effort_variables, response_items
from anydecode.server.protocol import ResponsesRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, extension, usage
from anydecode.server.tools import format_constraint, format_schema


async def respond(service: Service, body: ResponsesRequest, http: HttpRequest) -> Response:
    """Answer an input, whole or as a stream of events."""
    if body.n not in (None, 1):
        raise ApiError(400, "a response has one answer", param="n")
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    limits = (body.max_output_tokens, body.max_tokens, service.llm.max_length)
    options["max_tokens"] = next(limit for limit in limits if limit is not None)
    messages = response_items(body.input, body.instructions)
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = effort_variables(effort, service.tokenizer.chat_template)
    text = service.tokenizer.render_chat(conversation(messages), **variables)
    wanted = (body.text or {}).get("format")
    if not isinstance(wanted, dict | None):
        raise ApiError(400, f"text.format is an object, not {wanted!r}", param="text")
    constrain = None
    if format_schema(wanted) is not None:

        def constrain() -> Any:
            return service.after_reasoning(format_constraint(wanted), text[-64:])

    tokens = service.tokenizer.encode(text, special=False)
    run = await service.run([tokens], options, state, constrain=constrain, streamed=body.stream)
    answer = _Answer(service, body, run, text[-64:])
    if body.stream:
        stall = service.settings.stall_seconds
        return EventStream(run, answer.events(), stall, answer.failed)
    async with run:
        generations = await run.finished(http.receive)
    return JSONResponse(answer.whole(generations[0]))


class _Answer:
    """A response object, and the events of its coming about."""

    def __init__(self, service: Service, body: ResponsesRequest, run: ServerRun, end: str) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._new_parser = partial(service.parser, end, False)
        self._parser = self._new_parser()
        head = service.head("response", "resp")
        self._head = {"id": head["id"], "object": "response", "created_at": head["created"]}
        self._item = f"msg_{uuid4().hex}"
        self._number = 0

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The response when it is complete."""
        events = list(self._parser.push(generation.text, final=True))
        text = "".join(value for kind, value in events if kind == "content")
        return self._done(generation, text)

    def _done(self, generation: Generation, text: str) -> dict[str, Any]:
        counted = usage(self.run, self._new_parser)
        cut = generation.finish_reason == "length"
        return {
            **self._response("incomplete" if cut else "completed", [self._message(text)]),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": counted["completion_tokens_details"],
                "total_tokens": counted["total_tokens"],
            },
            "anydecode": extension([generation], self.service.tokenizer, self.body),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream, in OpenAI's order."""
        position = {"item_id": self._item, "output_index": 0, "content_index": 0}
        started = self._response("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        item = {**self._message(""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **position, part=_part(""))
        text, ended = "", False
        request = self.run.requests[0]
        while not ended:
            await self.run.news()
            ended = request.done
            if ended:
                self.run.generations()  # raises what ended it
            for kind, value in self._parser.push(request.take_text(), final=ended):
                if kind == "content":
                    text += value
                    yield self._event(
                        "response.output_text.delta", **position, delta=value, logprobs=[]
                    )
        yield self._event("response.output_text.done", **position, text=text, logprobs=[])
        yield self._event("response.content_part.done", **position, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(text))
        done = self._done(self.run.generations()[0], text)
        yield self._event(f"response.{done['status']}", response=done)

    def failed(self, error: ApiError) -> bytes:
        """The events of a stream that an error ends."""
        code = error.code or "server_error"
        told = {"code": code, "message": error.message}
        response = {**self._response("failed", []), "error": told}
        return self._event("error", **told, param=error.param) + self._event(
            "response.failed", response=response
        )

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
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

    def _message(self, text: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [_part(text)],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
