"""The error of an invalid body in one line: the field, what it must be, and what was given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anydecode.server.errors import ApiError
from anydecode.server.protocol import ALLOWED, COMPLETION_WINDOW, FUNCTION_NAME

#: What a value must be, by the type of pydantic's error.
_KINDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_MESSAGE = {"role": "user", "content": "Hello"}
_TOOL = {"type": "function", "function": {"name": "get_time"}}
#: Values of fields that are objects and lists, by the last part of their path ("*" for a number,
#: with the part before it).
_EXAMPLES: dict[str, Any] = {
    "allowed_tools": {"mode": "auto", "tools": [_TOOL]},
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": ["first text", "second text"],
    "function": _TOOL["function"],
    "logit_bias": {"50256": -100},
    "messages": [_MESSAGE],
    "messages.*": _MESSAGE,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "prediction": {"type": "content", "content": "expected text"},
    "reasoning": {"effort": "low"},
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["yes", "no"]},
    "tools": [_TOOL],
    "tools.*": _TOOL,
}
#: What a value must be or have, with the values of pydantic's error.
_RULES = {
    "finite_number": "be a finite number",
    "greater_than": "be more than {gt}",
    "greater_than_equal": "be {ge} or more",
    "less_than": "be less than {lt}",
    "less_than_equal": "be {le} or less",
    "string_too_long": "be a string of at most {max_length} characters",
    "string_too_short": "be a string of at least {min_length} characters",
    "too_long": "have at most {max_length} items",
    "too_short": "have at least {min_length} items",
}
#: What a text must be, by its pattern.
_PATTERNS = {
    FUNCTION_NAME: 'a string of letters, digits, "_", "." and "-"',
    COMPLETION_WINDOW: "a number with the unit s, m, h or d, of at most 30d",
}
#: Parts of a location that name a type of pydantic, not a field.
_TYPE_NAME = re.compile(
    r"(?:constrained-)?(?:str|int|float|bool|list|dict|literal)(?:\[.*\])?|[A-Z]\w*"
)


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error response for the errors that pydantic found in a body: for the first one. Of a
    field that allows values of several types, it names the place in the value that was reached."""
    first = _path(errors[0])
    of_field = [error for error in errors if _path(error)[: len(first)] == first]
    place = max(map(_path, of_field), key=_order)
    here = [error for error in of_field if _path(error) == place]
    # A value of an allowed type that breaks a rule is described by the rule.
    error = next((one for one in here if not _kind(one)), here[0])
    name = ".".join(place)
    if error["loc"][-1:] == ("[key]",):
        parent = ".".join(place[:-1])
        message = _described(f"the name {place[-1]!r} in {parent}", error)
    elif all(_kind(one) for one in here) and (name not in ALLOWED or error["type"] == "bool_type"):
        kinds = dict.fromkeys(filter(None, map(_kind, here)))
        described = f"{' or '.join(kinds)}{example(name, *kinds)}"
        message = f"{name or 'the body'} must be {described}{_given(error)}"
    else:
        message = _described(name, error)
    code = "unknown_parameter" if error["type"] == "extra_forbidden" else "invalid_body"
    return ApiError(400, message, code=code, param=name or None)


def example(name: str, *kinds: str) -> str:
    """An example of a value of the field `name`, if it must be an object or a list."""
    path = ["*" if part.isdecimal() else part for part in name.split(".")]
    last = ".".join(path[-2:]) if path[-1] == "*" else path[-1]
    if last not in _EXAMPLES or not {"an object", "a list"}.intersection(kinds):
        return ""
    return f", such as {json.dumps(_EXAMPLES[last])}"


def _kind(error: Mapping[str, Any]) -> str | None:
    """What a value of another type must be; None if an error is of another kind."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return _KINDS.get(error["type"])


def _described(name: str, error: Mapping[str, Any]) -> str:
    """The message of one error of the field `name`."""
    kind, values = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown field {name}"
    field = name or "the body"
    if kind == "missing":
        return f"{field} is required"
    if kind == "value_error":
        return f"{field}: {values['error']}"
    if kind in ("string_too_short", "too_short") and values["min_length"] == 1:
        return f"{field} is empty"
    if name in ALLOWED:
        number = "a number, " if kind == "float_type" else ""
        return f"{name} must be {number}{ALLOWED[name]}{_given(error)}"
    if kind in _KINDS:
        return f"{field} must be {_KINDS[kind]}{example(name, _KINDS[kind])}{_given(error)}"
    if kind == "string_pattern_mismatch":
        return f"{field} must be {_PATTERNS[values['pattern']]}"
    if kind in _RULES:
        return f"{field} must {_RULES[kind].format(**values)}{_given(error)}"
    return f"{field}: {error['msg']}"


def _path(error: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of an error's field in the body, without the names of types. An error of a member's
    name is one of the member."""
    parts = (str(part) for part in error["loc"])
    return tuple(part for part in parts if part != "[key]" and not _TYPE_NAME.fullmatch(part))


def _order(path: tuple[str, ...]) -> tuple[int, list[int]]:
    """Paths in the order of their depth, then of their positions in lists."""
    positions = [int(part) if part.isdecimal() and len(part) < 20 else 0 for part in path]
    return len(path), positions


def _given(error: Mapping[str, Any]) -> str:
    """The value that was given, if it is a number or a boolean."""
    value = error.get("input")
    return f", not {json.dumps(value)}" if isinstance(value, bool | int | float) else ""
