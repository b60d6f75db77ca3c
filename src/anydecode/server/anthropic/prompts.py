"""Translation of Anthropic's requests into the one form of chat requests."""

from __future__ import annotations

from typing import Any

from anydecode.constraints.json.relaxing import subschemas
from anydecode.server.anthropic.protocol import CountTokensRequest, MessagesTool, ToolChoice
from anydecode.server.errors import ApiError
from anydecode.server.options import check_extra_fields, ignored_fields
from anydecode.server.prompts import effort_variables
from anydecode.server.protocol import ChatRequest, Function, Message, Tool
from anydecode.server.translation import chat_request, thinking_variables

Block = dict[str, Any]

#: Fields of a tool without effect: those that answers do not name, and those that they name.
_UNNAMED_OF_TOOL = frozenset({"cache_control", "strict"})
_UNREAD_OF_TOOL = frozenset(
    {"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"}
)
#: Fields of a block that have an effect, by its type; those without one that answers do not name.
_READ_OF_BLOCK = {
    "text": {"text"},
    "thinking": {"thinking"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content"},
}
_UNNAMED_OF_BLOCK = frozenset({"type", "cache_control", "signature", "data"})
#: Types of `tool_choice`, as those of OpenAI's API; "tool" names one.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: CountTokensRequest, template: str | None) -> tuple[ChatRequest, list[str]]:
    """The chat request of `body`, and the names of the fields without effect.

    Raises:
        ApiError: The request is invalid or has a content that is not supported.
    """
    check_extra_fields(body)
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; a message has exactly one answer", param="n")
    ignored = ignored_fields(body, template)
    fields: dict[str, Any] = {"messages": _messages(body)}
    ignored += sorted(_unread_of_blocks(body))
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if body.tools is not None:
        fields["tools"] = [_tool(tool, number) for number, tool in enumerate(body.tools)]
        extra = (tool.model_extra or {} for tool in body.tools)
        ignored += (f"tools.{name}" for one in extra for name in _UNREAD_OF_TOOL if one.get(name))
    if (choice := body.tool_choice) is not None:
        fields["tool_choice"] = _tool_choice(choice)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = config.format.json_schema
            fields["response_format"] = {"type": "json_schema", "schema": schema}
        if config.effort is not None and not effort_variables(config.effort, template):
            ignored.append("output_config.effort")
    if body.stop_sequences:
        given = body.stop or []
        fields["stop"] = [*([given] if isinstance(given, str) else given), *body.stop_sequences]
    if (thinking := body.thinking) is not None:
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
        is_enabled = {"enabled": True, "disabled": False, "adaptive": None}[thinking.type]
        variables = thinking_variables(is_enabled, template)
        fields["chat_template_kwargs"] = variables
        if is_enabled is not None and not variables:
            ignored.append("thinking")
    return chat_request(body, **fields), ignored


def _unread_of_blocks(body: CountTokensRequest) -> set[str]:
    """The fields of blocks that have no effect, as "messages.content.citations"."""
    contents: list[tuple[str, Any]] = [("system", body.system)]
    contents += (("messages.content", message.content) for message in body.messages)
    found: set[str] = set()
    for path, content in contents:
        for block in content if isinstance(content, list) else ():
            unread = block.keys() - _READ_OF_BLOCK.get(block["type"], set()) - _UNNAMED_OF_BLOCK
            found.update(f"{path}.{name}" for name in unread if block[name])
            if block["type"] == "tool_result":
                contents.append((f"{path}.content", block.get("content")))
    return found


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        if choice.name is not None:
            message = f"tool_choice.name is given with type {choice.type}; only tool has a name"
            raise ApiError(400, message, param="tool_choice")
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _tool(tool: MessagesTool, number: int) -> Tool:
    where = f"tools.{number}"
    if tool.type not in (None, "custom"):
        raise _unsupported(where, tool.type, "custom tools only")
    for name in (tool.model_extra or {}).keys() - _UNNAMED_OF_TOOL - _UNREAD_OF_TOOL:
        raise ApiError(400, f"unknown field {where}.{name}", code="unknown_parameter")
    if tool.input_schema is None:
        raise ApiError(400, f"{where} needs an input_schema, an object", param="tools")
    for _, node in subschemas(tool.input_schema):
        if str(node.get("$ref")).startswith("/$defs/"):  # litellm's references within the schema
            node["$ref"] = f"#{node['$ref']}"
    return Tool(
        function=Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema
        )
    )


def _messages(body: CountTokensRequest) -> list[Message]:
    result = []
    if body.system:
        result.append(Message(role="system", content=_text(body.system, "system")))
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    for number, message in enumerate(body.messages):
        where = f"messages.{number}.content"
        if isinstance(message.content, str):
            result.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            result.append(_assistant(message.content, where, names))
        elif message.role == "user":
            result += _user(message.content, where, names)
        else:
            result.append(Message(role="system", content=_text(message.content, where)))
    return result


def _assistant(blocks: list[Block], where: str, names: dict[str, str]) -> Message:
    texts, reasoning, calls = [], [], []
    for number, block in enumerate(blocks):
        place, kind = f"{where}.{number}", block.get("type")
        if kind == "text":
            texts.append(_field(block, "text", place))
        elif kind == "thinking":
            reasoning.append(_field(block, "thinking", place))
        elif kind == "tool_use":
            name, call_id = _field(block, "name", place), _field(block, "id", place)
            if not isinstance(arguments := block.get("input"), dict):
                raise ApiError(400, f"{place} needs the field input, an object", param="messages")
            names[call_id] = name
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":  # readable only to those who wrote it
            raise _unsupported(place, kind, "text, thinking and tool_use here")
    extra: dict[str, Any] = {"reasoning_content": "".join(reasoning)} if reasoning else {}
    if calls:
        extra["tool_calls"] = calls
    return Message(role="assistant", content="".join(texts), **extra)


def _user(blocks: list[Block], where: str, names: dict[str, str]) -> list[Message]:
    """The messages of the tools whose results are among `blocks`, and of the user."""
    result: list[Message] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place, kind = f"{where}.{number}", block.get("type")
        if kind == "text":
            texts.append(_field(block, "text", place))
        elif kind == "tool_result":
            call_id = _field(block, "tool_use_id", place)
            content = block.get("content")
            text = "" if content is None else _text(content, f"{place}.content")
            extra: dict[str, Any] = {"tool_call_id": call_id}
            if call_id in names:
                extra["name"] = names[call_id]
            result.append(Message(role="tool", content=text, **extra))
        else:
            raise _unsupported(place, kind, "text and tool_result here")
    if texts or not result:
        result.append(Message(role="user", content="".join(texts)))
    return result


def _text(content: Any, where: str) -> str:
    """The text of a content that may contain only text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of blocks", param="messages")
    texts = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else block
        if kind != "text":
            raise _unsupported(f"{where}.{number}", kind, "text only here")
        texts.append(_field(block, "text", f"{where}.{number}"))
    return "".join(texts)


def _field(block: Block, name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise ApiError(400, f"{where} needs the field {name}, a string", param="messages")
    return value


def _unsupported(where: str, kind: Any, allowed: str) -> ApiError:
    return ApiError(
        400, f"{where} has type {kind!r}; this server accepts {allowed}", param="messages"
    )
