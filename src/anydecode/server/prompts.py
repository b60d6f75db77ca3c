"""Conversion of messages and prompts from the API into the engine's input."""

from __future__ import annotations

import json
from typing import Any

from anydecode.constraints.tools.formats import ToolFormat
from anydecode.models.chat import CallArguments
from anydecode.models.tokenizer import Tokenizer
from anydecode.server.errors import ApiError
from anydecode.server.images import ConversationImages
from anydecode.server.protocol import ChatRequest, Message, Tool

_TOOL_NOTE = (
    "You may call these functions, given as JSON:\n{tools}\nTo call one, answer with {example}."
)

#: Fields of OpenAI's messages that no prompt can contain, and what to do instead.
_REFUSED = {"audio": "messages are text", "function_call": "send tool_calls"}


def conversation(
    messages: list[Message], images: ConversationImages | None = None
) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect: content as one text, arguments as objects.

    Args:
        messages: The messages.
        images: Gets the images, whose marks stand for them in the texts; None: there may be none.

    Raises:
        ApiError: A message has audio or a `function_call`, or has no content and is not the
            assistant's; or it has an image, and `images` is None or refuses it.
    """
    result = []
    for number, message in enumerate(messages):
        plain = message.model_dump(exclude_none=True)
        for name in _REFUSED.keys() & plain.keys():
            field = f"messages.{number}.{name}"
            reason = f"{field} is not supported here: {_REFUSED[name]}"
            raise ApiError(400, reason, code="unsupported_parameter", param=field)
        if message.content is None and message.role != "assistant":
            field = f"messages.{number}.content"
            reason = f"{field} is required: a message of the role {message.role} has a text"
            raise ApiError(400, reason, code="invalid_body", param=field)
        plain["role"] = "system" if message.role == "developer" else message.role
        plain["content"] = text_of(message.content, images=images)
        if message.tool_calls is not None:
            plain["tool_calls"] = [_call(call) for call in message.tool_calls]
        result.append(plain)
    return result


def check_continued(body: ChatRequest, messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` if the last message of `body` cannot be continued. `messages`: those of
    `conversation`."""
    last = messages[-1]
    if body.add_generation_prompt:
        reason = "add_generation_prompt starts another message; send false"
    elif last["role"] != "assistant":
        reason = f"its role is {last['role']}; end with a message of the assistant"
    elif last.get("tool_calls"):
        reason = "it has tool calls; end with their results, or with a text"
    else:
        return
    raise _cannot_continue(reason)


def until_mark(rendered: str, content: str, mark: str) -> str:
    """A rendered conversation up to the end of its last message.

    Args:
        rendered: The conversation.
        content: The content of the last message, which ends with the mark.
        mark: A text that occurs nowhere else.

    Raises:
        ApiError: The template does not contain the content as it is, once.
    """
    prompt, found, rest = rendered.partition(mark)
    if not found or mark in rest or not (prompt + mark).endswith(content):
        raise _cannot_continue("the chat template changes or repeats it; end with another role")
    return prompt


def _cannot_continue(reason: str) -> ApiError:
    message = f"the last message cannot be continued: {reason}"
    return ApiError(400, message, param="continue_final_message")


def text_of(
    content: str | list[dict[str, Any]] | None,
    param: str = "messages",
    images: ConversationImages | None = None,
) -> str:
    """The text of a message's content, with marks of `images` for its images. Raises `ApiError` for
    other parts that are not text, and for images if it is None. `param` is the field of the request
    that has the content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if images is not None and part.get("type") == "image_url":
            texts.append(images.mark(part, param))
            continue
        if part.get("type") not in ("text", "input_text", "output_text"):
            kind = f"has type {part['type']!r}" if "type" in part else "has no type"
            message = f"a content part {kind}; this model accepts text only"
            raise ApiError(400, message, param=param)
        if not isinstance(part.get("text"), str):
            raise ApiError(400, "a text part needs the field text, a string", param=param)
        texts.append(part["text"])
    return "".join(texts)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call needs a function with a name", param="messages")
    arguments = function.get("arguments") or "{}"  # some clients send an empty text for none
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # invalid JSON that the model generated is passed on unchanged
    if isinstance(arguments, dict):
        arguments = CallArguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def template_of(tokenizer: Tokenizer, has_tools: bool) -> str | None:
    """The chat template that renders a conversation with or without tools, if there is one."""
    tool_template: str | None = getattr(tokenizer, "tool_template", None)
    return tool_template if has_tools and tool_template is not None else tokenizer.chat_template


def with_tools(
    messages: list[dict[str, Any]], tools: list[Tool], template: str | None, example: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and template variables that describe `tools` to the model: through its template,
    or in a system message if the template does not support tools."""
    described = [{**tool.model_dump(exclude_none=True), "type": "function"} for tool in tools]
    if template is not None and "tools" in template:
        return messages, {"tools": described}
    functions = json.dumps([tool["function"] for tool in described], ensure_ascii=False)
    note = _TOOL_NOTE.format(tools=functions, example=example)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{note}"}
        return [first, *messages[1:]], {}
    return [{"role": "system", "content": note}, *messages], {}


def with_calls(
    messages: list[dict[str, Any]], template: str | None, call_format: ToolFormat | None
) -> list[dict[str, Any]]:
    """The messages with their tool calls at the end of their content, as the model would generate
    them, if `template` leaves out tool calls. Arguments that are no JSON object are left out."""
    if call_format is None or (template is not None and "tool_calls" in template):
        return messages
    return [_with_calls(message, call_format) for message in messages]


def _with_calls(message: dict[str, Any], call_format: ToolFormat) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    calls = [
        (one["name"], one["arguments"] if isinstance(one["arguments"], dict) else {})
        for one in functions
    ]
    texts = (message["content"], call_format.render(calls))
    return {**message, "content": "\n".join(filter(None, texts))}


def effort_variables(effort: str | None, template: str | None) -> dict[str, Any]:
    """The template variables for a reasoning effort; empty if the template does not support it."""
    if effort is None or template is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template and effort == "none":
        return {"enable_thinking": False}
    return {}


def prompt_list(
    prompt: str | list[str] | list[int] | list[list[int]], param: str = "prompt"
) -> list[str | list[int]]:
    """The prompts as a list, from one prompt or several. `param` is the field that has them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, f"{param} is empty", param=param)
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)
