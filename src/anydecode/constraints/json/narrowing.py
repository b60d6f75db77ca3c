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

#: Maximum number of subschemas of a narrowed form, and how many of them a property that a negation
#: requires counts for, as it is canonicalized by itself.
_MAX_NODES, _NODES_PER_WITNESS = 50_000, 200
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
        whole = canonical_schema if canonical_schema is not None else schema
        return _Narrowing(index).node(whole)
    except ValueError:
        return None


class _TooLargeError(ValueError):
    """The narrowed form has too many subschemas."""


class _Narrowing:
    """Narrows one schema; the alternatives of a negation can repeat a subschema many times."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._num_nodes = 0

    def node(self, schema: Any) -> Any:
        """The narrowed form of a subschema. Raises `_TooLargeError`."""
        if not isinstance(schema, dict):
            return schema
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise _TooLargeError
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
                result[key] = {
                    name: self.node(subschema) for name, subschema in result[key].items()
                }
        if isinstance(result.get("prefixItems"), list):
            result["prefixItems"] = [self.node(subschema) for subschema in result["prefixItems"]]
        if isinstance(result.get("allOf"), list):
            parts = [
                self.node(subschema)
                for subschema in result.pop("allOf")
                if not is_negation(subschema)
            ]
            result |= {"allOf": parts} if parts else {}
        for key in ("items", "additionalProperties", "additionalItems"):
            if isinstance(result.get(key), dict):
                result[key] = self.node(result[key])
        self._choose_alternative(result)
        if not self._add_witnesses(schema, result):
            _close_object(result, self._index)
        self._shorten_array(schema, result)
        return result

    def _choose_alternative(self, result: dict[str, Any]) -> None:
        """Replaces `oneOf` and `anyOf` by one of their alternatives."""
        for key in ("oneOf", "anyOf"):
            options = [subschema for subschema in result.pop(key, ()) if subschema is not False]
            if options:
                alternative = self.node(options[(self._index // 2) % len(options)])
                result["allOf"] = [*result.get("allOf", ()), alternative]

    def _add_witnesses(self, schema: dict[str, Any], result: dict[str, Any]) -> bool:
        """Adds the properties that negations require, and allows only them and the required
        ones."""
        all_witnesses = witnesses(schema, self._index)
        properties = {
            name: subschema
            for name, subschema in result.get("properties", {}).items()
            if name in result.get("required", ())
        }
        for name, values in all_witnesses:
            self._num_nodes += _NODES_PER_WITNESS
            combined = {"allOf": values} if len(values) > 1 else values[0]
            try:
                simplified = canonical(combined, len(str(combined)))
            except ValueError:
                return False
            if isinstance(simplified, dict):
                simplified.pop("$schema", None)
            properties[name] = self.node(combined if simplified is None else simplified)
        if all_witnesses:
            result["properties"], result["additionalProperties"] = properties, False
            result["required"] = [*dict.fromkeys((*result.get("required", ()), *properties))]
            result.pop("patternProperties", None)
        return bool(all_witnesses)

    def _shorten_array(self, schema: dict[str, Any], result: dict[str, Any]) -> None:
        contains = schema.get("contains")
        min_items = int(result.get("minItems", 0))
        if contains is not None and schema.get("minContains", 1):
            min_items = max(min_items, int(schema.get("minContains", 1)))
            parts = [self.node(contains)]
            if "items" in result:
                parts.append(result["items"])
            result["items"] = {"allOf": parts} if len(parts) > 1 else parts[0]
            result["minItems"] = min_items
        if schema.get("uniqueItems") or contains is not None:
            result["maxItems"] = max(min_items, 1)
        if schema.get("uniqueItems") and min_items > 1 and "prefixItems" not in result:
            self._separate_items(result, min_items)

    def _separate_items(self, result: dict[str, Any], count: int) -> None:
        """Gives each of `count` items, which must differ, its own part of the listed values."""
        items: Any = result.get("items")
        values = items.get("enum") if isinstance(items, dict) else None
        if isinstance(values, list) and len(values) >= count:
            self._num_nodes += count
            starts = [(place + self._index) % count for place in range(count)]
            result["prefixItems"] = [{**items, "enum": values[start::count]} for start in starts]
            result["items"] = False


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
