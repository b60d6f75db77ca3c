"""Conversations and prompts as they come over the wire, made into what the engine takes."""

from __future__ import annotations

import json
from typing import Any

from anydecode.server.errors import ApiError
from anydecode.server.protocol import Message, Tool

_TOOL_NOTE = (
    "You may call these functions, given as JSON:\n{tools}\nTo call one, answer with {example}."
)


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: text in one piece, arguments as objects."""
    result = []
    for message in messages:
        plain = message.model_dump(exclude_none=True)
        plain["role"] = "system" if message.role == "developer" else message.role
        plain["content"] = text_of(message.content)
        if message.tool_calls is not None:
            plain["tool_calls"] = [_call(call) for call in message.tool_calls]
        result.append(plain)
    return result


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message; parts other than text are refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type")
            raise ApiError(400, f"this model takes text only, not {kind!r}", param="messages")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, "a text part needs its text as a string", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call needs a function with a name", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # what a model wrote wrongly is shown to it as it stands
    return {**call, "function": {**function, "arguments": arguments}}


def with_tools(
    messages: list[dict[str, Any]], tools: list[Tool], template: str | None, example: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation and template variables that tell the model of `tools`: by its template, or
    in a system message where the template knows nothing of tools."""
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    if template is not None and "tools" in template:
        return messages, {"tools": described}
    functions = json.dumps([tool["function"] for tool in described], ensure_ascii=False)
    note = _TOOL_NOTE.format(tools=functions, example=example)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{note}"}
        return [first, *messages[1:]], {}
    return [{"role": "system", "content": note}, *messages], {}


def effort_variables(effort: str | None, template: str | None) -> dict[str, Any]:
    """The template variables of a reasoning effort; none where the template knows nothing of it."""
    if effort is None or template is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template and effort == "none":
        return {"enable_thinking": False}
    return {}


def prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or many, as many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)


def response_items(items: str | list[dict[str, Any]], instructions: str | None) -> list[Message]:
    """The input of `/v1/responses` as messages."""
    messages = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    for item in items:
        if item.get("type", "message") != "message":
            kind = item.get("type")
            raise ApiError(400, f"input items are messages, not {kind!r}", param="input")
        content, role = item.get("content"), item.get("role", "user")
        if role not in ("system", "developer", "user", "assistant"):
            raise ApiError(400, f"no role {role!r}", param="input")
        if not isinstance(content, (str, list)) or not all(
            isinstance(part, dict) for part in content if not isinstance(content, str)
        ):
            raise ApiError(400, "a message's content is text or a list of parts", param="input")
        messages.append(Message(role=role, content=content))
    return messages
