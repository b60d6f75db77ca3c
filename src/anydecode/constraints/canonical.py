"""Schemas in a form that masks express more of: `not`, `if`, `oneOf` and the `dependent` keywords
turned into alternatives (by jsonschema-rs), and property names into properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import jsonschema_rs

from anydecode.constraints.patterns import matches, pattern_options
from anydecode.constraints.relaxing import nodes
from anydecode.constraints.termination import target

#: Longest schema, in characters, that is brought into this form: the work can grow faster than
#: the schema does.
LONGEST = 40_000
#: Most conditions on one object: each of them doubles the alternatives.
MOST_CONDITIONS = 8


def canonical(schema: Any, size: int) -> Any | None:
    """An equivalent schema, or None where there is none to be had in reasonable time. Raises
    `ValueError` where no text can meet the schema."""
    if size > LONGEST or _most_conditions(schema) > MOST_CONDITIONS:
        return None
    try:
        found = jsonschema_rs.canonicalize(
            schema, validate_formats=True, pattern_options=pattern_options(schema), offline=True
        )
        rewritten = found.to_json_schema()
    except Exception:  # unsupported corners; the relaxed schema serves as well
        return None
    if str(found.satisfiability()) == "no":
        raise ValueError("no value can meet the schema")
    orders = _Orders(schema)
    for _, node in nodes(rewritten):
        _name_properties(node)
        properties, required = node.get("properties", {}), node.get("required", [])
        rank = orders.ranks({*properties, *required})
        if properties:
            node["properties"] = dict(sorted(properties.items(), key=lambda item: rank(item[0])))
        if required:
            node["required"] = sorted(required, key=rank)
    return rewritten


def _most_conditions(schema: Any) -> int:
    """The most `if` and `dependent` keywords that one `allOf` of the schema puts together."""
    parts = [node.get("allOf") for _, node in nodes(schema)]
    return max((sum(map(_is_condition, one)) for one in parts if isinstance(one, list)), default=0)


def _is_condition(node: Any) -> bool:
    return isinstance(node, dict) and ("if" in node or not _DEPENDENT.isdisjoint(node))


#: Keywords whose subschemas speak of the same object as the schema they stand in.
_SAME_OBJECT = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "not"})
_DEPENDENT = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})


class _Orders:
    """The orders in which a schema's author wrote the properties of its objects."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._lists: list[dict[str, int]] = []
        known: set[tuple[str, ...]] = set()
        everywhere: dict[str, None] = {}
        for _, node in nodes(schema):
            names = tuple(dict.fromkeys(self._named(node, set())))
            everywhere.update(dict.fromkeys(names))
            if names and names not in known:
                known.add(names)
                self._lists.append({name: position for position, name in enumerate(names)})
        self._lists.sort(key=len)
        self._everywhere = {name: position for position, name in enumerate(everywhere)}

    def ranks(self, properties: Set[str]) -> Callable[[str], tuple[int, int]]:
        """A key to sort `properties` by: their order in the smallest object that has most of
        them, then that of the whole schema."""
        positions: dict[str, int] = max(
            self._lists, key=lambda own: len(own.keys() & properties), default={}
        )
        last = len(self._everywhere)
        return lambda name: (positions.get(name, len(positions)), self._everywhere.get(name, last))

    def _named(self, node: Any, followed: set[str]) -> Iterator[str]:
        """Property names of one object as they are written, its own first, each reference followed
        once."""
        if not isinstance(node, dict):
            return
        if isinstance(node.get("properties"), dict):
            yield from node["properties"]
        for key, value in node.items():
            if key == "required" and isinstance(value, list):
                yield from filter(_is_text, value)
            elif key == "propertyNames" and isinstance(value, dict):
                yield from filter(_is_text, value.get("enum", ()))
            elif key == "$ref" and _is_text(value) and value not in followed:
                followed.add(value)
                yield from self._named(target(self._root, value), followed)
            elif key in _DEPENDENT and isinstance(value, dict):
                for name, needed in value.items():
                    if isinstance(needed, list):
                        yield from filter(_is_text, needed)
                    else:
                        yield from self._named(needed, followed)
                    yield name
            elif key in _SAME_OBJECT:
                for one in value if isinstance(value, list) else [value]:
                    yield from self._named(one, followed)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _name_properties(node: dict[str, Any]) -> None:
    """Say `propertyNames` with properties and patterns where that says the same."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in node or node.get("type") != "object":
        return
    known = dict(node.get("properties", {}))
    others = node.get("additionalProperties", True)
    told = {key for key in names if key != "type"}
    if told <= {"const", "enum"} and told:
        allowed = names["enum"] if "enum" in names else [names["const"]]
        node["properties"] = {name: known.get(name, others) for name in allowed}
    elif told == {"pattern"}:
        if not all(matches(names["pattern"], name) for name in known):
            return
        node["patternProperties"] = {names["pattern"]: others}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]
