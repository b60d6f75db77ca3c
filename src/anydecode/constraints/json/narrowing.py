"""Narrowed schemas: parts of a schema that are easier to satisfy, for answers that keep failing
validation.

A narrowed schema leaves out what the schema allows but does not require. It is a heuristic: values
that it allows are still validated against the full schema.
"""

from __future__ import annotations

from typing import Any

from anydecode.constraints.json.canonical import DEFINITIONS, all_of, canonical
from anydecode.constraints.json.relaxing import (
    FORMATS,
    is_pattern,
    is_unmasked,
    without_assertions,
)
from anydecode.constraints.json.witnesses import is_negation, witnesses

#: Maximum number of subschemas of a narrowed form, and how many of them a schema that is
#: canonicalized by itself counts for: so many, and one for each of so many characters.
_MAX_NODES, _NODES_PER_CANONICAL, _CHARACTERS_PER_NODE = 50_000, 200, 4
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
        definitions = {key: whole[key] for key in DEFINITIONS if key in whole}
        return _Narrowing(index, definitions).node(whole)
    except ValueError:
        return None


class _TooLargeError(ValueError):
    """The narrowed form has too many subschemas."""


class _Narrowing:
    """Narrows one schema; the alternatives of a negation can repeat a subschema many times.

    Args:
        index: The number of the narrowed form.
        definitions: What the references in the schema refer to.
    """

    def __init__(self, index: int, definitions: dict[str, Any]) -> None:
        self._index = index
        self._definitions = definitions
        self._num_nodes = 0

    def node(self, schema: Any) -> Any:
        """The narrowed form of a subschema. Raises `_TooLargeError`."""
        if not isinstance(schema, dict):
            return schema
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise _TooLargeError
        if len(schema.get("oneOf", ())) > 1 and (chosen := self._only_one(schema)) is not None:
            return self.node(chosen)
        result = {key: value for key, value in schema.items() if not is_unmasked(key, value)}
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
        contained = _contained(schema)
        if isinstance(result.get("allOf"), list):
            parts = [
                self.node(subschema)
                for subschema in result.pop("allOf")
                if not is_negation(subschema) and not (contained and _is_contains(subschema))
            ]
            result |= {"allOf": parts} if parts else {}
        for key in ("items", "additionalProperties", "additionalItems"):
            if isinstance(result.get(key), dict):
                result[key] = self.node(result[key])
        self._choose_alternative(result)
        if not self._add_witnesses(schema, result):
            _close_object(result, self._index)
        if contained:
            self._list_items(schema, result, contained)
        else:
            self._shorten_array(schema, result)
        return result

    def _only_one(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """`schema` with one alternative of its `oneOf`, and without those values that others allow
        too; None if it has no canonical form."""
        options = schema["oneOf"]
        rest = {key: value for key, value in schema.items() if key not in ("oneOf", *DEFINITIONS)}
        definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
        for number in range(len(options)):
            others = [*options]
            option = others.pop((self._index // 2 + number) % len(options))
            combined = self._all_of([rest, option, {"not": {"anyOf": others}}])
            if isinstance(combined, dict) and "oneOf" not in combined:
                return {**combined, **definitions}
        return None

    def _all_of(self, schemas: list[Any]) -> Any | None:
        """As `all_of`. Raises `_TooLargeError`."""
        size = len(str({**self._definitions, "allOf": schemas}))
        self._num_nodes += _NODES_PER_CANONICAL + size // _CHARACTERS_PER_NODE
        if self._num_nodes > _MAX_NODES:
            raise _TooLargeError
        return all_of(schemas, self._definitions)

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
            combined = self._all_of(values)
            if combined is False:
                return False
            properties[name] = self.node({"allOf": values} if combined is None else combined)
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
            result["items"] = self._item(contains, schema.get("items", True))
            result["minItems"] = min_items
        if schema.get("uniqueItems") or contains is not None:
            result["maxItems"] = max(min_items, 1)
        if schema.get("uniqueItems") and min_items > 1 and "prefixItems" not in result:
            self._separate_items(result, min_items)

    def _list_items(
        self, schema: dict[str, Any], result: dict[str, Any], contained: list[Any]
    ) -> None:
        """Gives each of the schemas of `contained` an item of its own, the first ones."""
        items = schema.get("items", True)
        result["prefixItems"] = [self._item(subschema, items) for subschema in contained]
        result["minItems"] = result["maxItems"] = max(len(contained), schema.get("minItems", 0))

    def _item(self, contains: Any, items: Any) -> Any:
        """The narrowed form of the items that two schemas allow."""
        if items is True:
            return self.node(contains)
        combined = self._all_of([contains, items])
        if combined is None:
            return {"allOf": [self.node(contains), self.node(items)]}
        return self.node(combined)

    def _separate_items(self, result: dict[str, Any], count: int) -> None:
        """Gives each of `count` items, which must differ, its own part of the listed values."""
        items: Any = result.get("items")
        values = items.get("enum") if isinstance(items, dict) else None
        if isinstance(values, list) and len(values) >= count:
            self._num_nodes += count
            starts = [(place + self._index) % count for place in range(count)]
            result["prefixItems"] = [{**items, "enum": values[start::count]} for start in starts]
            result["items"] = False


def _contained(schema: dict[str, Any]) -> list[Any]:
    """The schemas of which an array must contain an item each, if there are several of them and
    nothing else says how its items are."""
    parts = [schema, *filter(_is_contains, schema.get("allOf", ()))]
    contained = [part["contains"] for part in parts if "contains" in part]
    is_simple = not any("minContains" in part for part in parts) and "prefixItems" not in schema
    fits = len(contained) <= schema.get("maxItems", len(contained))
    is_list = isinstance(schema.get("items", True), (dict, bool))
    return contained if len(contained) > 1 and is_simple and is_list and fits else []


def _is_contains(schema: Any) -> bool:
    """Whether a schema says only what an array contains."""
    return isinstance(schema, dict) and {"contains"} <= schema.keys() <= {"contains", "type"}


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
