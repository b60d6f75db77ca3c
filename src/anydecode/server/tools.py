"""What an answer may be: JSON formats and tool calls as constraints."""

from __future__ import annotations

import json
from typing import Any

from anydecode.constraints.guidance_engine import check_references, library, one_line
from anydecode.errors import ConstraintError
from anydecode.server.errors import ApiError
from anydecode.server.parsers import ToolFormat
from anydecode.server.protocol import Tool

#: One way of writing JSON, so that a model cannot fill its answer with white space.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def format_constraint(response_format: dict[str, Any] | None) -> Any:
    """The constraint of OpenAI's `response_format`; None where it asks for plain text."""
    schema = format_schema(response_format)
    if schema is None:
        return None
    from anydecode import JsonSchema

    return JsonSchema(schema)


def format_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON Schema that `response_format` asks for; None where it asks for plain text."""
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        assert response_format is not None
        inner = response_format.get("json_schema", response_format)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(400, "json_schema needs a schema object", param="response_format")
        return schema
    raise ApiError(400, f"no response format {kind!r}", param="response_format")


def chosen_tools(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None
) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether one must be."""
    offered = tools or []
    if choice is None or choice == "auto":
        return offered, False
    if choice == "none":
        return [], False
    if choice == "required":
        if not offered:
            raise ApiError(400, "tool_choice asks for a call, but no tools are given")
        return offered, True
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    found = [tool for tool in offered if tool.function.name == name]
    if not found:
        raise ApiError(400, f"tool_choice {choice!r} names none of the tools", param="tool_choice")
    return found, True


def tool_constraint(
    tools: list[Tool],
    style: ToolFormat,
    *,
    required: bool,
    parallel: bool,
    answer: dict[str, Any] | None,
) -> Any:
    """Calls whose arguments fit their schemas; where none is `required`, text instead, or JSON of
    the schema `answer`."""
    from anydecode import Grammar

    called: list[str] = []
    rules: list[str] = []
    for number, tool in enumerate(tools):
        name = tool.function.name
        schema = tool.function.parameters or _EMPTY
        _check(schema, f"the parameters of tool {name!r}")
        begun = json.dumps({"name": name})[:-1] + f', "{style.arguments}": '
        called.append(f'{json.dumps(begun)} arguments_{number} "}}"')
        # The root of a `%json` of its own: references mean in it what they mean in the schema.
        rules.append(f"arguments_{number}: %json {_written(schema)}")
    rules.append("one: " + " | ".join(called))
    several = ' (", " one)*' if parallel else ""
    rules.append(f'json: "[" one{several} "]"' if style.listed else "json: one")
    opening, closing = json.dumps(style.opening), json.dumps(style.closing)
    body = f"{opening} /\\s?/ json /\\s?/ {closing}" if style.closing else f"{opening} json"
    rules.append(f"call: {body}")
    calling = "call (/\\n?/ call)*" if parallel and style.closing else "call"
    if required:
        rules.insert(0, f"start: {calling}")
    elif answer is None:
        rules.insert(0, f"start: TEXT | TEXT? {calling}")
        tag = "".join(f"\\x{ord(letter):02x}" for letter in style.opening)
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/")
    else:
        _check(answer, "the schema of response_format")
        rules.insert(0, f"start: answer | {calling}")
        rules.append(f"answer: %json {_written(answer)}")
    return Grammar("\n".join(rules))


def _check(schema: dict[str, Any], what: str) -> None:
    """Raise `ConstraintError`, in the words of `what`, for a schema that no grammar can enforce."""
    text = json.dumps(schema)
    check_references(text)
    matcher = library().LLMatcher
    error = matcher.validate_grammar(matcher.grammar_from_json_schema(text))
    if error:
        raise ConstraintError(f"{what} cannot be enforced: {one_line(error)}")


def _written(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": _WRITING})
