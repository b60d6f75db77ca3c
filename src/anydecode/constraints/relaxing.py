"""JSON schemas rewritten for the mask engine.

`relaxed` takes out what llguidance cannot express. What is left allows more than the schema, never
less, because keywords are only dropped where they can only forbid. Everything taken out is named
with its path, and left to the validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any

import jsonschema_rs

from anydecode.constraints.guidance_engine import library

#: Keywords that forbid something a mask does not express.
UNMASKED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
        "dependentSchemas", "dependentRequired", "dependencies", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
#: Keywords taken out only when the engine refuses what is left.
_BOUNDS = frozenset(
    {
        "pattern", "format", "multipleOf", "minProperties", "maxProperties", "minLength",
        "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "additionalProperties", "patternProperties", "additionalItems",
    }
)  # fmt: skip
_COMBINED = frozenset({"allOf", "anyOf", "oneOf"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"additionalProperties", "items", "additionalItems"})
_DATA = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
#: Formats that llguidance enforces.
FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
_BACK_REFERENCE, _LOOK_AROUND = re.compile(r"\\[1-9]"), re.compile(r"\(\?<?[=!]")
#: How often the engine is given a weaker schema before everything is left to the validator.
LEVELS = 4


def relaxed(schema: Any, level: int = 0) -> tuple[Any, list[str]]:
    """A schema for the mask engine that allows all `schema` does, and what was taken out
    ("keyword at #/path"). The higher the `level` (below `LEVELS`), the less is left. Formats that
    the validator does not know either forbid nothing and are not named."""
    dropped: list[str] = []
    if level >= LEVELS - 1:
        dropped += [f"{key} at {path}" for path, node in nodes(schema) for key in _asserting(node)]
        kind = schema.get("type") if isinstance(schema, dict) else None
        return ({} if kind is None else {"type": kind}), dropped
    return _node(schema, "#", level, dropped), dropped


def nodes(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its JSON pointer."""
    stack = [(path, schema)]
    while stack:
        here, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield here, node
        for key, value in node.items():
            at = f"{here}/{_escaped(key)}"
            if key in _DATA:
                continue
            if key in _BY_NAME or key in ("dependentSchemas", "dependencies"):
                if isinstance(value, dict):
                    stack += [(f"{at}/{_escaped(name)}", one) for name, one in value.items()]
            elif isinstance(value, list):
                stack += [(f"{at}/{i}", one) for i, one in enumerate(value)]
            elif isinstance(value, dict):
                stack.append((at, value))


def guarded(schema: Any, longest: int) -> Any:
    """`schema` with a length of at most `longest` characters for strings that have no bound."""
    if not isinstance(schema, dict):
        return schema
    result = {
        key: value if key in _DATA else _below(key, value, lambda k, v: guarded(v, longest))
        for key, value in schema.items()
    }
    kinds = schema.get("type")
    is_string = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    bounded = {"maxLength", "enum", "const", "$ref", "format", "pattern"} & set(schema)
    if is_string and not bounded and schema.get("minLength", 0) <= longest:
        result["maxLength"] = longest
    return result


#: Keywords beside which an object's properties do not tell all that it may have.
_OPENING = frozenset(
    {
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
        "dependentRequired", "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not",
        "if", "$ref", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_WITHIN = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})


def closed(schema: Any) -> Any:
    """`schema` with objects that name their properties held to those, where it says nothing of
    others and nothing else speaks of the same object."""
    shared = {
        node["$ref"]
        for path, node in nodes(schema)
        if isinstance(node.get("$ref"), str)
        and (len(_asserting(node)) > 1 or _WITHIN & set(path.split("/")))
    }
    strange = any(
        not str(node.get("$ref", "#/")).startswith("#/") or "$dynamicRef" in node
        for _, node in nodes(schema)
    )
    result = deepcopy(schema)
    for path, node in nodes(result):
        within = _WITHIN & set(path.split("/"))
        used = strange or any(path == one or path.startswith(one + "/") for one in shared)
        if path == "#" and "#" in shared:
            used = True
        if not within and not used and _can_close(node):
            node["additionalProperties"] = False
    return result


def _can_close(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    return (
        isinstance(properties, dict)
        and bool(properties)
        and not _OPENING & node.keys()
        and all(name in properties for name in required)
        and node.get("minProperties", 0) <= len(properties)
    )


def _below(key: str, value: Any, visit: Any) -> Any:
    """`value` of keyword `key` with `visit(name or index, subschema)` done to its subschemas."""
    if key in _BY_NAME and isinstance(value, dict):
        return {name: visit(name, one) for name, one in value.items()}
    if isinstance(value, list) and (key in _LISTS or key == "items"):
        return [visit(i, one) for i, one in enumerate(value)]
    if isinstance(value, dict):
        return visit(None, value)
    return value


def _node(schema: Any, path: str, level: int, dropped: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    out = set(_refused(schema, level))
    if out & {"patternProperties", "properties"} or _loses_pattern(schema):
        out |= {"additionalProperties"} & set(schema)
    dropped += [
        f"{key} at {path}"
        for key in schema
        if key in out and (key != "format" or is_format(schema[key]))
    ]
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in out:
            if key == "pattern" and level == 0 and (looser := without_assertions(value)):
                result[key] = looser
        elif key in _DATA:
            result[key] = value
        else:
            result[key] = _members(key, value, f"{path}/{_escaped(key)}", level, dropped)
    return result


def _members(key: str, value: Any, path: str, level: int, dropped: list[str]) -> Any:
    """`value` of keyword `key` with its subschemas relaxed."""

    def visit(name: Any, one: Any) -> Any:
        below = path if name is None else f"{path}/{_escaped(str(name))}"
        return _node(one, below, level, dropped)

    relaxed = _below(key, value, visit)
    if key == "patternProperties" and isinstance(value, dict):
        bad = [pattern for pattern in value if not is_pattern(pattern)]
        dropped += [f"patternProperties at {path}/{_escaped(pattern)}" for pattern in bad]
        return {name: one for name, one in relaxed.items() if name not in bad}
    return relaxed


def _refused(schema: dict[str, Any], level: int) -> Iterator[str]:
    for key, value in schema.items():
        if (
            key in UNMASKED
            or (key == "pattern" and not is_pattern(value))
            or (key == "format" and value not in FORMATS)
            or (level > 0 and key in _BOUNDS)
            or (level > 1 and key in _COMBINED and len(schema) > 1)
        ):
            yield key
    if level > 1 and "$ref" in schema:
        yield from (key for key in schema if key not in ("$ref", "$defs", "definitions"))


def _loses_pattern(schema: dict[str, Any]) -> bool:
    patterns = schema.get("patternProperties")
    return isinstance(patterns, dict) and not all(is_pattern(pattern) for pattern in patterns)


def without_formats(schema: Any) -> tuple[Any, list[str]]:
    """A copy of `schema` in which formats are not asserted, and what was taken out."""
    copy = deepcopy(schema)
    taken = []
    for path, node in nodes(copy):
        if "format" in node:
            taken.append(f"format {node.pop('format')} at {path}")
    return copy, taken


def unknown_formats(schema: Any) -> list[str]:
    """Formats that nobody here knows ("format NAME at #/path"): annotations, not rules."""
    return [
        f"format {node['format']} at {path}"
        for path, node in nodes(schema)
        if isinstance(node.get("format"), str) and not is_format(node["format"])
    ]


def _asserting(node: dict[str, Any]) -> list[str]:
    quiet = {"title", "description", "default", "examples", "$schema", "$id", "id", "$comment"}
    return [key for key in node if key not in quiet | {"$defs", "definitions"}]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


@lru_cache(1024)
def without_assertions(pattern: Any) -> str | None:
    """A regular expression that matches all that `pattern` does, with look-around left out and
    anything in place of back-references; None where that is not enough."""
    if not isinstance(pattern, str):
        return None
    kept: list[str] = []
    at = 0
    in_class = False
    while at < len(pattern):
        if pattern[at] == "\\":
            piece = pattern[at : at + 2]
            kept.append("[\\s\\S]*" if not in_class and _BACK_REFERENCE.match(piece) else piece)
            at += 2
            continue
        if not in_class and _LOOK_AROUND.match(pattern, at):
            end = _group_end(pattern, at)
            if end is None:
                return None
            at = end + 1
            continue
        in_class = (in_class or pattern[at] == "[") and pattern[at] != "]"
        kept.append(pattern[at])
        at += 1
    looser = "".join(kept)
    return looser if is_pattern(looser) else None


def _group_end(pattern: str, start: int) -> int | None:
    """Where the group that opens at `start` closes."""
    depth, in_class, at = 0, False, start
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return at
        at += 1
    return None


@lru_cache(1024)
def is_pattern(pattern: Any) -> bool:
    """Whether the mask engine understands a regular expression."""
    if not isinstance(pattern, str):
        return False
    matcher = library().LLMatcher
    grammar = matcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not matcher.validate_grammar(grammar)


@lru_cache(1024)
def is_format(name: Any) -> bool:
    """Whether the mask engine or the validator knows a format."""
    if not isinstance(name, str) or name in FORMATS:
        return isinstance(name, str)
    schema = {"type": "string", "format": name}
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=False)
    except Exception:  # the library says "unknown format" with errors of several kinds
        return False
    return True
