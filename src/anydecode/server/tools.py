"""Constraints for response formats and tool calls."""

from __future__ import annotations

import json
from typing import Any

from anydecode.constraints.guidance_engine import check_references, library, one_line
from anydecode.errors import ConstraintError
from anydecode.server.errors import ApiError
from anydecode.server.parsers import ToolFormat
from anydecode.server.protocol import Tool

#: Fixed JSON formatting, so that a model cannot fill its answer with white space.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def format_constraint(response_format: dict[str, Any] | None) -> Any:
    """The constraint for OpenAI's `response_format`; None for plain text."""
    schema = format_schema(response_format)
    if schema is None:
        return None
    from anydecode.constraints.json.json_schema import JsonSchema

    return JsonSchema(schema)


def format_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON Schema of `response_format`; None for plain text."""
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
    raise ApiError(
        400,
        f"response_format has type {kind!r}; it must be text, json_object or json_schema",
        param="response_format",
    )


def select_tools(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None
) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether a call is required."""
    offered = tools or []
    if choice is None or choice == "auto":
        return offered, False
    if choice == "none":
        return [], False
    if choice == "required":
        if not offered:
            raise ApiError(400, "tool_choice requires a call, but no tools are given")
        return offered, True
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    matching = [tool for tool in offered if tool.function.name == name]
    if not matching:
        raise ApiError(
            400, f"tool_choice {choice!r} is not one of the given tools", param="tool_choice"
        )
    return matching, True


def tool_constraint(
    tools: list[Tool],
    call_format: ToolFormat,
    *,
    required: bool,
    parallel: bool,
    answer_schema: dict[str, Any] | None,
) -> Any:
    """A grammar of tool calls whose arguments match their schemas. If no call is `required`, the
    answer may instead be text, or JSON that matches `answer_schema` if given."""
    from anydecode.constraints.languages import Grammar

    call_rules: list[str] = []
    rules: list[str] = []
    for number, tool in enumerate(tools):
        name = tool.function.name
        schema = tool.function.parameters or _EMPTY
        _check(schema, f"the parameters of tool {name!r}")
        prefix = json.dumps({"name": name})[:-1] + f', "{call_format.arguments}": '
        call_rules.append(f'{json.dumps(prefix)} arguments_{number} "}}"')
        # A separate `%json` rule: references resolve within it as in the schema alone.
        rules.append(f"arguments_{number}: %json {_schema_json(schema)}")
    rules.append("one: " + " | ".join(call_rules))
    several = ' (", " one)*' if parallel else ""
    rules.append(f'json: "[" one{several} "]"' if call_format.is_list else "json: one")
    opening, closing = json.dumps(call_format.opening), json.dumps(call_format.closing)
    body = f"{opening} /\\s?/ json /\\s?/ {closing}" if call_format.closing else f"{opening} json"
    rules.append(f"call: {body}")
    calls = "call (/\\n?/ call)*" if parallel and call_format.closing else "call"
    if required:
        rules.insert(0, f"start: {calls}")
    elif answer_schema is None:
        rules.insert(0, f"start: TEXT | TEXT? {calls}")
        tag = "".join(f"\\x{ord(letter):02x}" for letter in call_format.opening)
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/")
    else:
        _check(answer_schema, "the schema of response_format")
        rules.insert(0, f"start: answer | {calls}")
        rules.append(f"answer: %json {_schema_json(answer_schema)}")
    return Grammar("\n".join(rules))


def _check(schema: dict[str, Any], what: str) -> None:
    """Raise `ConstraintError`, which names `what`, if a grammar cannot enforce the schema."""
    text = json.dumps(schema)
    check_references(text)
    error = _grammar_error(text)
    if error:
        raise ConstraintError(f"{what} cannot be enforced: {error}")


def _grammar_error(schema: str) -> str:
    """Why no grammar can enforce the schema, in one line; empty if one can."""
    matcher = library().LLMatcher
    error = matcher.validate_grammar(matcher.grammar_from_json_schema(schema))
    return one_line(error) if error else ""


def _schema_json(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_STYLE})
