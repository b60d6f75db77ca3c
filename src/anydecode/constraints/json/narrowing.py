"""Narrowed schemas: parts of a schema that are easier to satisfy, for answers that keep failing
validation.

A narrowed schema leaves out what the schema allows but does not require. It is a heuristic: values
that it allows are still validated against the full schema.
"""

from __future__ import annotations

from typing import Any

from anydecode.constraints.json.canonical import canonical
from anydecode.constraints.json.relaxing import FORMATS, UNMASKED, is_pattern, without_assertions
from anydecode.constraints.json.witnesses import is_negation, witnesses

#: Patterns for values of formats that the mask engine does not support.
_FORMAT_PATTERNS = {
    "idn-email": r"[a-z]{1,12}@[a-z]{1,12}\.com",
    "idn-hostname": r"[a-z]{1,12}\.com",
    "iri": r"https://[a-z]{1,12}\.com/[a-z]{0,12}",
    "iri-reference": r"/[a-z]{1,12}",
    "uri-reference": r"/[a-z]{1,12}",
    "uri-template": r"/[a-z]{1,12}",
    "json-pointer": r"/[a-z]{1,12}",
    "relative-json-pointer": r"[0-9]/[a-z]{1,12}",
    "regex": r"[a-z]{1,12}",
}


def narrowed_schema(schema: Any, index: int, size: int) -> Any | None:
    """The `index`-th narrowed form of `schema`; None if there is nothing to narrow.

    Even indices keep every property, odd ones only required properties. Alternatives are chosen in
    turn. `size` is the length of the schema's text, in characters.
    """
    if not isinstance(schema, dict):
        return None
    try:
        canonical_schema = canonical(schema, size)
    except ValueError:
        return None
    return _node(canonical_schema if canonical_schema is not None else schema, index)


def _node(schema: Any, index: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key not in UNMASKED}
    if result.get("format") not in (None, *FORMATS):
        pattern = _FORMAT_PATTERNS.get(result.pop("format"))
        if pattern is not None and "pattern" not in result:
            result["pattern"] = f"^{pattern}$"
    if "pattern" in result and not is_pattern(result["pattern"]):
        relaxed_pattern = without_assertions(result.pop("pattern"))
        if relaxed_pattern is not None:
            result["pattern"] = relaxed_pattern
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(result.get(key), dict):
            result[key] = {name: _node(subschema, index) for name, subschema in result[key].items()}
    if isinstance(result.get("prefixItems"), list):
        result["prefixItems"] = [_node(subschema, index) for subschema in result["prefixItems"]]
    if isinstance(result.get("allOf"), list):
        parts = [
            _node(subschema, index)
            for subschema in result.pop("allOf")
            if not is_negation(subschema)
        ]
        result |= {"allOf": parts} if parts else {}
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(result.get(key), dict):
            result[key] = _node(result[key], index)
    _choose_alternative(result, index)
    if not _add_witnesses(schema, result, index):
        _close_object(result, index)
    _shorten_array(schema, result, index)
    return result


def _choose_alternative(result: dict[str, Any], index: int) -> None:
    """Replaces `oneOf` and `anyOf` by one of their alternatives."""
    for key in ("oneOf", "anyOf"):
        options = [subschema for subschema in result.pop(key, ()) if subschema is not False]
        if options:
            alternative = _node(options[(index // 2) % len(options)], index)
            result["allOf"] = [*result.get("allOf", ()), alternative]


def _add_witnesses(schema: dict[str, Any], result: dict[str, Any], index: int) -> bool:
    """Adds the properties that negations require, and allows only them and required properties."""
    all_witnesses = witnesses(schema, index)
    properties = {
        name: subschema
        for name, subschema in result.get("properties", {}).items()
        if name in result.get("required", ())
    }
    for name, values in all_witnesses:
        combined = {"allOf": values} if len(values) > 1 else values[0]
        try:
            simplified = canonical(combined, len(str(combined)))
        except ValueError:
            return False
        if isinstance(simplified, dict):
            simplified.pop("$schema", None)
        properties[name] = _node(combined if simplified is None else simplified, index)
    if all_witnesses:
        result["properties"], result["additionalProperties"] = properties, False
        result["required"] = [*dict.fromkeys((*result.get("required", ()), *properties))]
        result.pop("patternProperties", None)
    return bool(all_witnesses)


def _close_object(result: dict[str, Any], index: int) -> None:
    properties = result.get("properties")
    if result.get("type") != "object" and properties is None:
        return
    if "allOf" in result or "$ref" in result:
        return  # the other parts have properties of their own
    required = result.get("required", [])
    additional = result.get("additionalProperties", True)
    properties = dict(properties or {})
    for name in required:
        properties.setdefault(name, additional)
    if index % 2:
        properties = {name: subschema for name, subschema in properties.items() if name in required}
    if len(properties) >= result.get("minProperties", 0) and "patternProperties" not in result:
        result["properties"], result["additionalProperties"] = properties, False


def _shorten_array(schema: dict[str, Any], result: dict[str, Any], index: int) -> None:
    contains = schema.get("contains")
    min_items = int(result.get("minItems", 0))
    if contains is not None and schema.get("minContains", 1):
        min_items = max(min_items, int(schema.get("minContains", 1)))
        parts = [_node(contains, index)]
        if "items" in result:
            parts.append(result["items"])
        result["items"] = {"allOf": parts} if len(parts) > 1 else parts[0]
        result["minItems"] = min_items
    if schema.get("uniqueItems") or contains is not None:
        result["maxItems"] = max(min_items, 1)
