"""Schemas in a form that masks express more of: `not`, `if`, `oneOf` and the `dependent` keywords
turned into alternatives (by jsonschema-rs), and property names into properties."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anydecode.constraints.relaxing import nodes

#: Longest schema, in characters, that is brought into this form: the work can grow faster than
#: the schema does.
LONGEST = 40_000


def canonical(schema: Any, size: int) -> Any | None:
    """An equivalent schema, or None where there is none to be had in reasonable time. Raises
    `ValueError` where no text can meet the schema."""
    if size > LONGEST:
        return None
    import jsonschema_rs

    try:
        found = jsonschema_rs.canonicalize(schema, validate_formats=True, offline=True)
        rewritten = found.to_json_schema()
    except Exception:  # unsupported corners; the relaxed schema serves as well
        return None
    if str(found.satisfiability()) == "no":
        raise ValueError("no value can meet the schema")
    return _rewritten(rewritten, _ranks(schema))


def _ranks(schema: Any) -> dict[str, int]:
    """Property names by first appearance: the order in which the author wants them written."""
    ranks: dict[str, int] = {}
    for name in _names(schema):
        ranks.setdefault(name, len(ranks))
    return ranks


def _names(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        properties = node.get("properties")
        if isinstance(properties, dict):
            yield from properties
        for value in node.values():
            yield from _names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _names(value)


def _rewritten(schema: Any, ranks: dict[str, int]) -> Any:
    for _, node in nodes(schema):
        _name_properties(node)
        properties = node.get("properties")
        if isinstance(properties, dict):
            last = len(ranks)
            node["properties"] = dict(
                sorted(properties.items(), key=lambda item: ranks.get(item[0], last))
            )
    return schema


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
        try:
            pattern = re.compile(names["pattern"])
        except re.error:
            return
        if not all(pattern.search(name) for name in known):
            return
        node["patternProperties"] = {names["pattern"]: others}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]
