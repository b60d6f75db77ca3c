"""Canonical schemas, of which a mask can express more: jsonschema-rs turns `not`, `if`, `oneOf` and
the `dependent` keywords into alternatives, and `propertyNames` is turned into properties."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import jsonschema_rs

from anydecode.constraints.json.relaxing import subschemas
from anydecode.constraints.json.termination import resolve_reference
from anydecode.constraints.patterns import matches, pattern_options

#: Maximum length, in characters, of a schema that is canonicalized: the time can grow faster than
#: the schema.
MAX_CHARACTERS = 40_000
#: Maximum number of conditions on one object: each of them doubles the alternatives.
MAX_CONDITIONS = 8
#: Keywords that say how a schema is read, and the beginnings of references to its definitions.
DEFINITIONS = ("$schema", "$defs", "definitions")
_REFERENCES = ("#/$defs/", "#/definitions/")


def canonical(schema: Any, size: int) -> Any | None:
    """Returns an equivalent schema in canonical form.

    Args:
        schema: A JSON schema.
        size: The length of its text, in characters.

    Returns:
        The canonical schema; None if the schema is too large or not supported.

    Raises:
        ValueError: No value can satisfy the schema.
    """
    if size > MAX_CHARACTERS or _max_conditions(schema) > MAX_CONDITIONS:
        return None
    try:
        canonicalized = jsonschema_rs.canonicalize(
            schema, validate_formats=True, pattern_options=pattern_options(schema), offline=True
        )
        rewritten = canonicalized.to_json_schema()
        json.dumps(rewritten)  # a bound that no double equals is a `Decimal`: a mask cannot keep it
    except Exception:  # unsupported features; the relaxed schema is used instead
        return None
    if str(canonicalized.satisfiability()) == "no":
        raise ValueError("no value can satisfy the schema")
    property_orders = _PropertyOrders(schema)
    for _, node in subschemas(rewritten):
        _rewrite_property_names(node)
        properties, required = node.get("properties", {}), node.get("required", [])
        rank = property_orders.ranks({*properties, *required})
        if properties:
            node["properties"] = dict(sorted(properties.items(), key=lambda item: rank(item[0])))
        if required:
            node["required"] = sorted(required, key=rank)
    return rewritten


def all_of(schemas: list[Any], definitions: dict[str, Any]) -> Any | None:
    """A schema, in canonical form, of the values that all `schemas` allow.

    Args:
        schemas: JSON schemas.
        definitions: The definitions that their references refer to, and "$schema", by keyword
            (`DEFINITIONS`).

    Returns:
        The schema without the definitions: False if no value is allowed, None if there is no such
        form.
    """
    combined = {**definitions, "allOf": schemas}
    references = {node["$ref"] for _, node in subschemas(combined) if "$ref" in node}
    if not all(str(reference).startswith(_REFERENCES) for reference in references):
        return None  # to another root than that of the combined schema
    try:
        simplified = canonical(combined, len(str(combined)))
    except ValueError:
        return False
    if not isinstance(simplified, dict):
        return simplified
    for key in DEFINITIONS[1:]:
        if simplified.get(key, {}).keys() - definitions.get(key, {}).keys():
            return None
    return {key: value for key, value in simplified.items() if key not in DEFINITIONS}


def _max_conditions(schema: Any) -> int:
    """The maximum number of `if` and `dependent` keywords in one `allOf` of the schema."""
    parts = [node.get("allOf") for _, node in subschemas(schema)]
    return max(
        (sum(map(_is_condition, item)) for item in parts if isinstance(item, list)), default=0
    )


def _is_condition(node: Any) -> bool:
    return isinstance(node, dict) and ("if" in node or not _DEPENDENT.isdisjoint(node))


#: Keywords whose subschemas apply to the same object as the schema that contains them.
_SAME_OBJECT = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "not"})
_DEPENDENT = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})


class _PropertyOrders:
    """The orders in which the properties of a schema's objects are written."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._orders: list[dict[str, int]] = []
        seen: set[tuple[str, ...]] = set()
        overall_order: dict[str, None] = {}
        for _, node in subschemas(schema):
            names = tuple(dict.fromkeys(self._property_names(node, set())))
            overall_order.update(dict.fromkeys(names))
            if names and names not in seen:
                seen.add(names)
                self._orders.append({name: position for position, name in enumerate(names)})
        self._orders.sort(key=len)
        self._overall_order = {name: position for position, name in enumerate(overall_order)}

    def ranks(self, properties: Set[str]) -> Callable[[str], tuple[int, int]]:
        """Returns a key function to sort `properties`: by their order in the smallest object that
        has the most of them, then by their order in the whole schema."""
        positions: dict[str, int] = max(
            self._orders, key=lambda order: len(order.keys() & properties), default={}
        )
        num_names = len(self._overall_order)
        return lambda name: (
            positions.get(name, len(positions)),
            self._overall_order.get(name, num_names),
        )

    def _property_names(self, node: Any, visited: set[str]) -> Iterator[str]:
        """The property names of one object in the order written, those of `properties` first. Each
        reference is followed once."""
        if not isinstance(node, dict):
            return
        if isinstance(node.get("properties"), dict):
            yield from node["properties"]
        for key, value in node.items():
            if key == "required" and isinstance(value, list):
                yield from filter(_is_string, value)
            elif key == "propertyNames" and isinstance(value, dict):
                yield from filter(_is_string, value.get("enum", ()))
            elif key == "$ref" and _is_string(value) and value not in visited:
                visited.add(value)
                yield from self._property_names(resolve_reference(self._root, value), visited)
            elif key in _DEPENDENT and isinstance(value, dict):
                for name, dependency in value.items():
                    if isinstance(dependency, list):
                        yield from filter(_is_string, dependency)
                    else:
                        yield from self._property_names(dependency, visited)
                    yield name
            elif key in _SAME_OBJECT:
                for item in value if isinstance(value, list) else [value]:
                    yield from self._property_names(item, visited)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _rewrite_property_names(node: dict[str, Any]) -> None:
    """Replaces `propertyNames` by properties and patterns if that is equivalent."""
    found = _names_and_patterns(node.get("propertyNames"))
    if found is None or node.get("type") != "object":
        return
    names, patterns = found
    properties = dict(node.get("properties", {}))
    additional = node.get("additionalProperties", True)
    by_pattern = node.get("patternProperties")
    if by_pattern is None:
        by_pattern = dict.fromkeys(patterns, additional)
        if len(by_pattern) > 1 or (additional is not True and _any_matches(patterns, properties)):
            return
    if by_pattern.keys() != set(patterns):
        return
    if patterns and not all(name in names or _any_matches(patterns, [name]) for name in properties):
        return
    properties = {name: value for name, value in properties.items() if name in names or patterns}
    for name in names:
        if not _any_matches(patterns, [name]):
            properties.setdefault(name, additional)
    node["properties"] = properties
    if patterns:
        node["patternProperties"] = by_pattern
    node["additionalProperties"] = False
    del node["propertyNames"]


def _names_and_patterns(names: Any) -> tuple[list[str], list[str]] | None:
    """The names and the patterns of names that the value of a `propertyNames` allows; None if it is
    no alternative of these."""
    if not isinstance(names, dict):
        return None
    listed: list[str] = []
    patterns: list[str] = []
    for option in names["anyOf"] if names.keys() == {"anyOf"} else [names]:
        keywords = option.keys() - {"type"} if isinstance(option, dict) else set()
        if keywords == {"pattern"}:
            patterns.append(option["pattern"])
        elif keywords == {"enum"}:
            listed += option["enum"]
        elif keywords == {"const"}:
            listed.append(option["const"])
        else:
            return None
    return listed, patterns


def _any_matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(matches(pattern, name) for pattern in patterns for name in names)
