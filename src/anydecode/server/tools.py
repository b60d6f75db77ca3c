"""Constraints for response formats and tool calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

from anydecode.constraints.tools.formats import ToolFormat
from anydecode.errors import ConstraintError
from anydecode.server.errors import ApiError, api_error
from anydecode.server.field_errors import example
from anydecode.server.protocol import StructuredOutputs, Tool

#: The fields that describe a schema in a response format.
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
#: The fields of a `tool_choice` that is an object, by its type, in responses. In chats they are in
#: an object of their own, whose name is the type.
_FIELDS_OF_CHOICE: dict[str, Set[str]] = {
    "function": frozenset({"name"}),
    "allowed_tools": frozenset({"mode", "tools"}),
}
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def constraint_factory(
    response_format: dict[str, Any] | None, structured: StructuredOutputs | None
) -> Callable[[], Any] | None:
    """Returns a function that makes the constraint of an answer without tools; None if there is
    none. Raises `ApiError` if the request gives several constraints."""
    is_tag = response_format is not None and response_format.get("type") == "structural_tag"
    schema = None if is_tag else format_schema(response_format)
    has_format = is_tag or schema is not None
    given = [] if structured is None else _kinds(structured)
    if len(given) + has_format > 1:
        names = [*(f"structured_outputs.{name}" for name in given)]
        names += ["response_format"] * has_format
        raise ApiError(
            400, f"{' and '.join(names)} are given; an answer has one constraint", param=names[0]
        )
    if given:
        assert structured is not None
        return partial(_structured_constraint, structured, given[0])
    if is_tag:
        assert response_format is not None
        tag = {name: value for name, value in response_format.items() if name != "type"}
        return partial(_structural_tag, tag, structured)
    if schema is not None:
        return partial(_json_constraint, schema, structured)
    return None


@contextmanager
def with_field(field: str) -> Iterator[None]:
    """Give errors of a constraint the field that describes it."""
    try:
        yield
    except (ApiError, ConstraintError) as error:
        failure = api_error(error)
        failure.param = failure.param or field
        raise failure from error


def constraint_field(structured: StructuredOutputs | None) -> str:
    """The field of a request without tools that describes the constraint of its answer."""
    kinds = [] if structured is None else _kinds(structured)
    return f"structured_outputs.{kinds[0]}" if kinds else "response_format"


def answer_schema_of(
    response_format: dict[str, Any] | None, structured: StructuredOutputs | None
) -> dict[str, Any] | None:
    """The JSON Schema of an answer beside tools; None for text. Raises `ApiError` if
    `structured_outputs` constrains the answer."""
    if structured is not None and (given := _kinds(structured)):
        raise ApiError(
            400,
            f"structured_outputs.{given[0]} and tools are given; use response_format beside tools",
            param="structured_outputs",
        )
    return format_schema(response_format)


def _kinds(structured: StructuredOutputs) -> list[str]:
    """The names of the constraints that are set."""
    values = structured.model_dump(by_alias=True)
    kinds = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")
    unset = {"json_object": (None, False)}  # as a schema, false allows nothing
    return [name for name in kinds if values[name] not in unset.get(name, (None,))]


def _structured_constraint(structured: StructuredOutputs, kind: str) -> Any:
    from anydecode.constraints.languages import Choice, Grammar, Regex

    if kind == "choice":
        return Choice(structured.choice or ())
    if kind == "regex":
        return Regex(structured.regex or "")
    if kind == "grammar":
        text = structured.grammar or ""
        return Grammar(text, "gbnf" if "::=" in text else "lark")
    if kind == "structural_tag":
        return _structural_tag(structured.structural_tag, structured)
    schema = {"type": "object"} if kind == "json_object" else structured.json_schema
    return _json_constraint(schema, structured)


def _structural_tag(tag: Any, structured: StructuredOutputs | None) -> Any:
    from anydecode.constraints.structural_tag import StructuralTag

    return StructuralTag(tag, **json_options(structured))


def _json_constraint(schema: Any, structured: StructuredOutputs | None) -> Any:
    from anydecode.constraints.json.json_schema import JsonSchema

    return JsonSchema(schema, **json_options(structured))


def json_options(structured: StructuredOutputs | None) -> dict[str, Any]:
    """The options of `JsonSchema` that a request asks for; by default without limits that the
    schema does not have."""
    asked = structured or StructuredOutputs()
    options: dict[str, Any] = {
        "max_string": asked.max_string or 0,
        "extra_properties": not asked.disable_additional_properties,
    }
    if asked.disable_any_whitespace:
        options["whitespace"] = ""
    elif asked.whitespace_pattern is not None:
        options["whitespace"] = asked.whitespace_pattern
    return options


def format_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON Schema of `response_format`; None for plain text. The type json_object may have one
    too, as in llama.cpp's server."""
    given = response_format or {"type": "text"}
    kind = given.get("type")
    if kind == "text":
        _check_fields(given, ())
        return None
    if kind == "json_object":
        _check_fields(given, ("schema",))
        schema = {"type": "object"} if given.get("schema") is None else given["schema"]
        return _checked_schema(kind, schema)
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        if inner is not given:
            _check_fields(given, ("json_schema",))
        if isinstance(inner, dict):
            _check_fields(inner, _SCHEMA_FIELDS)
        return _checked_schema(kind, inner.get("schema") if isinstance(inner, dict) else None)
    if kind == "structural_tag":  # alone, `constraint_factory` makes it
        message = "response_format has type structural_tag and tools are given; use one of them"
        raise ApiError(400, message, param="response_format")
    raise ApiError(
        400,
        f"response_format has type {kind!r}; it must be text, json_object, json_schema or"
        " structural_tag",
        param="response_format",
    )


def _check_fields(given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise `ApiError` if a response format has fields beside its type and those `known`."""
    unknown = sorted(given.keys() - {"type", *known})
    if unknown:
        message = f"unknown field {', '.join(unknown)} in response_format"
        raise ApiError(400, message, code="unknown_parameter", param="response_format")


def _checked_schema(kind: str, schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise ApiError(400, f"{kind} needs a schema object", param="response_format")
    return schema


def select_tools(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None
) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether a call is required."""
    offered = tools or []
    for name, count in Counter(tool.function.name for tool in offered).items():
        if count > 1:
            raise ApiError(400, f"tools has {count} functions called {name!r}", param="tools")
    if choice is None or choice == "auto":
        return offered, False
    if choice == "none":
        return [], False
    if choice == "required":
        if not offered:
            message = "tool_choice requires a call, but no tools are given"
            raise ApiError(400, message, param="tool_choice")
        return offered, True
    if isinstance(choice, str):
        raise ApiError(
            400,
            f"tool_choice is {choice!r}; it must be none, auto, required, or an object of type"
            " function or allowed_tools",
            param="tool_choice",
        )
    kind, fields = _fields_of_choice(choice)
    if kind == "function":
        return _named_tools(offered, [fields], choice), True
    names, mode = fields.get("tools"), fields.get("mode", "auto")
    if not isinstance(names, list) or not names or mode not in ("auto", "required"):
        raise ApiError(
            400,
            "tool_choice of type allowed_tools needs a mode, auto or required, and a list of tools",
            param="tool_choice",
        )
    return _named_tools(offered, names, choice), mode == "required"


def _fields_of_choice(choice: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type of a `tool_choice`, and its fields. Raises `ApiError` if it has others."""
    kind = choice.get("type", "function")
    if kind not in tuple(_FIELDS_OF_CHOICE):
        message = f"tool_choice has type {kind!r}; it must be {' or '.join(_FIELDS_OF_CHOICE)}"
        raise ApiError(400, message, param="tool_choice")
    known = _FIELDS_OF_CHOICE[kind]
    is_nested = choice.get(kind) is not None
    names: Set[str] = {"type", kind} if is_nested else {"type", *known}
    parts = [("tool_choice", choice, names)]
    if is_nested:
        if not isinstance(choice[kind], dict):
            field = f"tool_choice.{kind}"
            message = f"{field} must be an object{example(field, 'an object')}"
            raise ApiError(400, message, param="tool_choice")
        parts.append((f"tool_choice.{kind}", choice[kind], known))
    for path, part, names in parts:
        for name in sorted(part.keys() - names):
            if part[name] is not None:
                field = f"{path}.{name}"
                raise ApiError(400, f"unknown field {field}", code="unknown_parameter", param=field)
    return kind, parts[-1][1]


def allows_parallel(choice: str | dict[str, Any] | None, parallel: bool | None) -> bool:
    """Whether an answer may have several calls: if the request does not forbid it, and does not
    name the function, which is then called once."""
    is_named = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
    return parallel is not False and not is_named


def _named_tools(
    offered: list[Tool], references: Sequence[Any], choice: dict[str, Any]
) -> list[Tool]:
    """The tools among `offered` that `references` name. Raises `ApiError` if one is missing."""
    selected = []
    for reference in references:
        is_function = isinstance(reference, dict) and reference.get("type") in (None, "function")
        named = reference.get("function", reference) if is_function else None
        name = named.get("name") if isinstance(named, dict) else None
        matching = [tool for tool in offered if tool.function.name == name]
        if not matching:
            raise ApiError(
                400, f"tool_choice {choice!r} is not one of the given tools", param="tool_choice"
            )
        selected += matching
    return selected


def parameters_of(tools: list[Tool]) -> dict[str, Any]:
    """The schemas of the tools' arguments, by name."""
    return {tool.function.name: _object_schema(tool.function.parameters) for tool in tools}


def _object_schema(schema: dict[str, Any] | None) -> dict[str, Any]:
    """`schema`, restricted to objects, as arguments are."""
    return ({"type": "object"} | schema if "$ref" not in schema else schema) if schema else _EMPTY


def tool_constraint(
    tools: list[Tool],
    call_format: ToolFormat,
    *,
    required: bool,
    parallel: bool,
    answer_schema: dict[str, Any] | None,
    options: dict[str, Any] | None = None,
) -> Any:
    """A constraint of tool calls whose arguments match their schemas. If no call is `required`, the
    answer may instead be text, or JSON that matches `answer_schema` if given. `options`: those of
    `json_options`."""
    from anydecode.constraints.json.json_schema import JsonSchema
    from anydecode.constraints.tools.tool_calls import ToolCalls

    def json_schema(schema: dict[str, Any]) -> JsonSchema:
        # Fixed white space, so that a model cannot fill its answer with it.
        return JsonSchema(schema, **{"whitespace": None, **(options or json_options(None))})

    return ToolCalls(
        {name: json_schema(schema) for name, schema in parameters_of(tools).items()},
        call_format,
        is_required=required,
        is_parallel=parallel,
        answer=None if answer_schema is None else json_schema(answer_schema),
    )
