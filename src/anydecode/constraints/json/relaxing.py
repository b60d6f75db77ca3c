"""Rewrites JSON schemas for the mask engine.

`relaxed_schema` removes the keywords that llguidance cannot express. The result allows everything
that the schema allows: only keywords that forbid something are removed. Every removed keyword is
reported with its path and left to the validator.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from decimal import Decimal
from itertools import accumulate
from typing import Any

import jsonschema_rs

from anydecode.constraints.byte_cache import byte_cached
from anydecode.constraints.guidance_engine import library

#: Keywords with restrictions that a mask cannot express.
UNMASKED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
        "dependentSchemas", "dependentRequired", "dependencies", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
#: Keywords that forbid something, `$ref` aside.
ASSERTING = UNMASKED | {
    "type", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "additionalItems", "enum", "const", "anyOf", "oneOf", "allOf", "pattern",
    "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
}  # fmt: skip
#: Keywords that forbid nothing.
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "id", "$comment"}
)
#: Keywords removed only if the engine rejects the schema without `UNMASKED`.
_BOUNDS = frozenset(
    {
        "pattern", "format", "multipleOf", "minProperties", "maxProperties", "minLength",
        "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "additionalProperties", "patternProperties", "additionalItems",
    }
)  # fmt: skip
_COMBINERS = frozenset({"allOf", "anyOf", "oneOf"})
_NAMED_SUBSCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SUBSCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"additionalProperties", "items", "additionalItems"})
_DATA_KEYWORDS = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
#: Formats that llguidance enforces.
FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
#: Those of them that are validated too: the mask allows a leap second at every time.
INEXACT_FORMATS = frozenset({"date-time", "time"})
#: Those of which the mask does not limit the length as the validator does.
LONG_FORMATS = frozenset({"email", "hostname"})
#: Maximum number of remainders of a `multipleOf` that a mask expresses; its time grows with them.
_MAX_REMAINDERS = 10_000
_BACK_REFERENCE, _LOOK_AROUND = re.compile(r"\\[1-9]"), re.compile(r"\(\?<?[=!]")
#: Maximum size of the patterns and names of formats whose properties are cached, in bytes.
_MAX_CACHED_BYTES = 4 << 20
#: Number of levels of relaxation; at the last one everything is left to the validator.
NUM_LEVELS = 4


def relaxed_schema(schema: Any, level: int = 0) -> tuple[Any, list[str]]:
    """Relaxes `schema` for the mask engine.

    Args:
        schema: A JSON schema.
        level: The degree of relaxation, below `NUM_LEVELS`; higher levels keep less.

    Returns:
        A schema that allows everything `schema` allows, and the removed keywords, as
        "keyword at #/path". Formats unknown to the validator forbid nothing and are not listed.
    """
    dropped: list[str] = []
    if level >= NUM_LEVELS - 1:
        dropped += [
            f"{key} at {path}" for path, node in subschemas(schema) for key in _asserting(node)
        ]
        type_name = schema.get("type") if isinstance(schema, dict) else None
        return ({} if type_name is None else {"type": type_name}), dropped
    return _node(schema, "#", level, dropped), dropped


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every subschema that is an object, with its JSON pointer."""
    stack = [(path, schema)]
    while stack:
        node_path, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node_path, node
        for key, value in node.items():
            subpath = f"{node_path}/{pointer_part(key)}"
            if key in _DATA_KEYWORDS:
                continue
            if key in _NAMED_SUBSCHEMAS or key in ("dependentSchemas", "dependencies"):
                if isinstance(value, dict):
                    stack += [
                        (f"{subpath}/{pointer_part(name)}", subschema)
                        for name, subschema in value.items()
                    ]
            elif isinstance(value, list):
                stack += [(f"{subpath}/{i}", subschema) for i, subschema in enumerate(value)]
            elif isinstance(value, dict):
                stack.append((subpath, value))


def with_max_string(schema: Any, max_length: int) -> Any:
    """`schema` with strings without a bound limited to `max_length` characters."""
    if not isinstance(schema, dict):
        return schema
    result = {
        key: value
        if key in _DATA_KEYWORDS
        else _map_subschemas(key, value, lambda k, v: with_max_string(v, max_length))
        for key, value in schema.items()
    }
    types = schema.get("type")
    is_string = types == "string" or (isinstance(types, list) and "string" in types)
    bounding_keywords = {"maxLength", "enum", "const", "$ref", "format", "pattern"} & set(schema)
    if is_string and not bounding_keywords and schema.get("minLength", 0) <= max_length:
        result["maxLength"] = max_length
    return result


#: Keywords that can allow or require properties not listed in `properties`.
_OPEN_OBJECT_KEYWORDS = frozenset(
    {
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
        "dependentRequired", "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not",
        "if", "$ref", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})


def without_extra_properties(schema: Any) -> Any:
    """`schema` with `additionalProperties` false for objects that list their properties, if the
    schema does not mention additional properties and no other subschema applies to the object."""
    shared_references = {
        node["$ref"]
        for path, node in subschemas(schema)
        if isinstance(node.get("$ref"), str)
        and (len(_asserting(node)) > 1 or _COMBINING & set(path.split("/")))
    }
    has_foreign_references = any(
        not str(node.get("$ref", "#/")).startswith("#/") or "$dynamicRef" in node
        for _, node in subschemas(schema)
    )
    result = deepcopy(schema)
    for path, node in subschemas(result):
        is_combined = _COMBINING & set(path.split("/"))
        is_shared = has_foreign_references or any(
            ancestor in shared_references for ancestor in accumulate(path.split("/"), _joined)
        )
        if path == "#" and "#" in shared_references:
            is_shared = True
        if not is_combined and not is_shared and _can_close(node):
            node["additionalProperties"] = False
    return result


def _joined(path: str, part: str) -> str:
    return f"{path}/{part}"


def _can_close(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    return (
        isinstance(properties, dict)
        and bool(properties)
        and not _OPEN_OBJECT_KEYWORDS & node.keys()
        and all(name in properties for name in required)
        and node.get("minProperties", 0) <= len(properties)
    )


def _map_subschemas(key: str, value: Any, visit: Any) -> Any:
    """`value` of keyword `key` with `visit(name or index, subschema)` applied to its subschemas."""
    if key in _NAMED_SUBSCHEMAS and isinstance(value, dict):
        return {name: visit(name, subschema) for name, subschema in value.items()}
    if isinstance(value, list) and (key in _SUBSCHEMA_LISTS or key == "items"):
        return [visit(i, subschema) for i, subschema in enumerate(value)]
    if isinstance(value, dict):
        return visit(None, value)
    return value


def _node(schema: Any, path: str, level: int, dropped: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    removed = set(_unsupported_keywords(schema, level))
    if removed & {"patternProperties", "properties"} or _loses_pattern(schema):
        removed |= {"additionalProperties"} & set(schema)
    dropped += [
        f"{key} at {path}"
        for key in schema
        if key in removed and (key != "format" or is_format(schema[key]))
    ]
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in removed:
            if key == "pattern" and level == 0 and (relaxed_pattern := without_assertions(value)):
                result[key] = relaxed_pattern
        elif key in _DATA_KEYWORDS:
            result[key] = value
        else:
            result[key] = _members(key, value, f"{path}/{pointer_part(key)}", level, dropped)
    return result


def _members(key: str, value: Any, path: str, level: int, dropped: list[str]) -> Any:
    """`value` of keyword `key` with its subschemas relaxed."""

    def visit(name: Any, subschema: Any) -> Any:
        subpath = path if name is None else f"{path}/{pointer_part(str(name))}"
        return _node(subschema, subpath, level, dropped)

    members = _map_subschemas(key, value, visit)
    if key == "patternProperties" and isinstance(value, dict):
        unsupported = [pattern for pattern in value if not is_pattern(pattern)]
        dropped += [
            f"patternProperties at {path}/{pointer_part(pattern)}" for pattern in unsupported
        ]
        return {name: subschema for name, subschema in members.items() if name not in unsupported}
    return members


def _unsupported_keywords(schema: dict[str, Any], level: int) -> Iterator[str]:
    for key, value in schema.items():
        if (
            is_unmasked(key, value)
            or (key == "pattern" and not is_pattern(value))
            or (key == "format" and not (isinstance(value, str) and value in FORMATS))
            or (level > 0 and key in _BOUNDS)
            or (level > 1 and key in _COMBINERS and len(schema) > 1)
        ):
            yield key
    if level > 1 and "$ref" in schema:
        yield from (key for key in schema if key not in ("$ref", "$defs", "definitions"))


def is_unmasked(key: str, value: Any) -> bool:
    """Whether a mask does not express a keyword: none can, or one would take too long."""
    return key in UNMASKED or (key == "multipleOf" and _num_remainders(value) > _MAX_REMAINDERS)


def _num_remainders(step: Any) -> int:
    """The number of remainders of division by a `multipleOf`, counted in its last decimal."""
    if isinstance(step, int):
        return abs(step)
    if not isinstance(step, float) or not math.isfinite(step):
        return 0
    decimal = Decimal(str(step)).normalize()
    return abs(int(decimal.scaleb(max(0, -int(decimal.as_tuple().exponent)))))


def _loses_pattern(schema: dict[str, Any]) -> bool:
    patterns = schema.get("patternProperties")
    return isinstance(patterns, dict) and not all(is_pattern(pattern) for pattern in patterns)


def without_formats(schema: Any) -> tuple[Any, list[str]]:
    """A copy of `schema` without `format`, and the removed formats ("format NAME at #/path")."""
    copy = deepcopy(schema)
    removed = []
    for path, node in subschemas(copy):
        if "format" in node:
            removed.append(f"format {node.pop('format')} at {path}")
    return copy, removed


def unknown_formats(schema: Any) -> list[str]:
    """Formats that neither engine nor validator supports ("format NAME at #/path"). They are
    annotations and forbid nothing."""
    return [
        f"format {node['format']} at {path}"
        for path, node in subschemas(schema)
        if isinstance(node.get("format"), str) and not is_format(node["format"])
    ]


def _asserting(node: dict[str, Any]) -> list[str]:
    return [key for key in node if key not in ANNOTATIONS | {"$defs", "definitions"}]


def pointer_part(key: str) -> str:
    """`key` as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


@byte_cached(_MAX_CACHED_BYTES)
def without_assertions(pattern: Any) -> str | None:
    """A regular expression that matches everything `pattern` matches: without look-around, and
    with back-references replaced by any text. None if the engine does not support the result."""
    if not isinstance(pattern, str):
        return None
    parts: list[str] = []
    position = 0
    in_class = False
    while position < len(pattern):
        if pattern[position] == "\\":
            escape = pattern[position : position + 2]
            parts.append("[\\s\\S]*" if not in_class and _BACK_REFERENCE.match(escape) else escape)
            position += 2
            continue
        if not in_class and _LOOK_AROUND.match(pattern, position):
            end = _group_end(pattern, position)
            if end is None:
                return None
            position = end + 1
            continue
        in_class = (in_class or pattern[position] == "[") and pattern[position] != "]"
        parts.append(pattern[position])
        position += 1
    relaxed_pattern = "".join(parts)
    return relaxed_pattern if is_pattern(relaxed_pattern) else None


def _group_end(pattern: str, start: int) -> int | None:
    """The index of the bracket that closes the group opened at `start`; None if there is none."""
    depth, in_class, position = 0, False, start
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return position
        position += 1
    return None


@byte_cached(_MAX_CACHED_BYTES)
def is_pattern(pattern: Any) -> bool:
    """Whether the mask engine supports the regular expression `pattern`."""
    if not isinstance(pattern, str):
        return False
    matcher = library().LLMatcher
    grammar = matcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not matcher.validate_grammar(grammar)


@byte_cached(_MAX_CACHED_BYTES)
def is_format(name: Any) -> bool:
    """Whether the mask engine or the validator supports the format `name`."""
    if not isinstance(name, str) or name in FORMATS:
        return isinstance(name, str)
    schema = {"type": "string", "format": name}
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=False)
    except Exception:  # the library reports unknown formats with several error types
        return False
    return True
