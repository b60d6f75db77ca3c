"""Translation of a request of `/v1/responses` to one of a conversation, and truncation of the
conversation to the context length."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from anydecode.api.llm import LLM
from anydecode.server import translation
from anydecode.server.chat_run import render_tokens
from anydecode.server.errors import ApiError
from anydecode.server.field_errors import invalid_body
from anydecode.server.options import check_extra_fields, effective_temperature
from anydecode.server.protocol import (
    INCLUDE_LOGPROBS,
    ChatRequest,
    Function,
    ResponsesRequest,
    Tool,
)
from anydecode.server.responses.items import messages_of
from anydecode.server.responses.store import Item
from anydecode.server.service import Service

#: Fields of a tool without effect, and all of them.
_UNREAD_OF_TOOL = frozenset({"allowed_callers", "defer_loading", "output_schema"})
_FIELDS_OF_TOOL = _UNREAD_OF_TOOL | {"type", "name", "description", "parameters", "strict"}
#: Names of the fields of a conversation's request that are others in `/v1/responses`.
_NAMES = {"messages": "input", "response_format": "text.format"}


def chat_request(body: ResponsesRequest, items: list[Item]) -> ChatRequest:
    """The request of a conversation that `body` asks for.

    Args:
        body: The request.
        items: Its input items, after those of earlier responses.

    Raises:
        ApiError: A field is invalid.
    """
    check_extra_fields(body)
    _check_single(body)
    limit = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    return translation.chat_request(
        body,
        stream=body.stream,
        max_tokens=limit,
        messages=messages_of(items, body.instructions),
        response_format=None if body.text is None else body.text.format,
        tools=[_tool(tool, number) for number, tool in enumerate(body.tools or ())],
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def num_logprobs(body: ResponsesRequest) -> int | None:
    """The alternatives per token whose log-probabilities are returned; None for none."""
    return (body.top_logprobs or 0) if INCLUDE_LOGPROBS in (body.include or ()) else None


def _check_single(body: ResponsesRequest) -> None:
    """Raise `ApiError` unless there is one answer, and what is returned with it is asked for by
    the names of this endpoint."""
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; a response has exactly one answer", param="n")
    if body.resume is not None and len(body.resume.samples) != 1:
        count = len(body.resume.samples)
        raise ApiError(400, f"resume has {count} samples; a response has one", param="resume")
    if body.logprobs is not None:
        raise ApiError(
            400,
            f"logprobs is a field of other endpoints; send include: [{INCLUDE_LOGPROBS!r}] and"
            " top_logprobs",
            param="logprobs",
        )


def unread_tool_fields(tools: list[dict[str, Any]] | None) -> set[str]:
    """Names of the fields of tools that have a value and no effect."""
    return {f"tools.{name}" for tool in tools or () for name in _UNREAD_OF_TOOL if tool.get(name)}


def _tool(tool: dict[str, Any], number: int) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise ApiError(
            400,
            f"a tool has type {kind!r}; this server runs no tools of its own: it must be function",
            code="unsupported_parameter",
            param="tools",
        )
    for name in tool.keys() - _FIELDS_OF_TOOL:
        field = f"tools.{number}.{name}"
        raise ApiError(400, f"unknown field {field}", code="unknown_parameter", param=field)
    fields = {name: tool.get(name) for name in ("name", "description", "parameters")}
    try:
        return Tool(function=Function.model_validate(fields))
    except ValidationError as error:
        message = f"a tool's {invalid_body(error.errors(include_url=False)).message}"
        raise ApiError(400, message, code="invalid_body", param="tools") from None


def renamed(error: ApiError) -> ApiError:
    """An error of a conversation's request with the names of `/v1/responses`."""
    message, param = error.message, error.param
    for name, other in _NAMES.items():
        if param == name:
            message, param = message.replace(name, other), other
    return ApiError(error.status, message, code=error.code, param=param, headers=error.headers)


async def truncate(service: Service, chat: ChatRequest, state: dict[str, Any]) -> None:
    """Remove the oldest turns of a conversation, but not its system messages and the last turn,
    until its prompt leaves room for an answer.

    The room is `max_tokens`, by default a quarter of the context length, and at most half of it.
    """
    length = service.llm.max_length
    room = min(chat.max_tokens if chat.max_tokens is not None else length // 4, length // 2)
    limit = min(length - max(1, room), service.settings.max_prompt or length)
    messages = chat.messages
    system = [one for one in messages if one.role in ("system", "developer")]
    others = [one for one in messages if one.role not in ("system", "developer")]
    starts = [0, *(place for place, one in enumerate(others) if place and one.role == "user")]

    async def fits(num_dropped: int) -> bool:
        chat.messages = [*system, *others[starts[num_dropped] :]] if num_dropped else messages
        return len(await render_tokens(service, chat, state)) <= limit

    if len(starts) == 1 or await fits(0):
        return
    low, high = 1, len(starts) - 1  # numbers of turns to drop; the last one always stays
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    chat.messages = [*system, *others[starts[low] :]]


def echo(body: ResponsesRequest, llm: LLM) -> dict[str, Any]:
    """The fields of a response object that repeat the request, or have the defaults of `llm`.

    Raises:
        ApiError: A number in them is not finite, which JSON cannot represent.
    """
    reasoning = body.reasoning
    text_format = (body.text and body.text.format) or {"type": "text"}
    tools = [
        {"strict": True, "parameters": None, "description": None, **tool}
        for tool in body.tools or ()
    ]
    for name, value in (
        ("text.format", text_format),
        ("tools", tools),
        ("tool_choice", body.tool_choice),
    ):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            message = f"{name} has a number that is not finite; leave it out"
            raise ApiError(400, message, param=name) from None
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "service_tier": "default",
        "temperature": effective_temperature(body, llm),
        "text": {
            "format": text_format,
            "verbosity": (body.text and body.text.verbosity) or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": llm.sampling_defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        **{
            name: value
            for name in ("user", "safety_identifier", "prompt_cache_key")
            if isinstance(value := (body.model_extra or {}).get(name), str)
        },
    }
