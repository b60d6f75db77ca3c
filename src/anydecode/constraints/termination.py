"""Recursive schemas without an end: found before a model writes the same brackets for ever."""

from __future__ import annotations

from typing import Any

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def cannot_terminate(schema: Any) -> bool:
    """Whether every value under `schema` would have to contain another one without end. Only
    references within the schema are followed; whatever is not understood counts as ending."""
    ending: set[str] = set()
    while True:
        found = _Finder(schema, ending)
        ends = found.ends(schema)
        if ends or not found.new:
            return not ends
        ending |= found.new


class _Finder:
    """One round of a fixed point: which references end, given those already known to."""

    def __init__(self, root: Any, known: set[str]) -> None:
        self.root = root
        self.known = known
        self.new: set[str] = set()
        self._open: set[str] = set()

    def ends(self, node: Any) -> bool:
        if not isinstance(node, dict) or "enum" in node or "const" in node:
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and not self._reference_ends(reference):
            return False
        parts = node.get("allOf")
        if isinstance(parts, list) and not all([self.ends(part) for part in parts]):
            return False
        for key in ("anyOf", "oneOf"):
            options = node.get(key)
            if isinstance(options, list) and options and not any(list(map(self.ends, options))):
                return False
        return self._own_ends(node)

    def _own_ends(self, node: dict[str, Any]) -> bool:
        kinds = node.get("type")
        if kinds is None or (isinstance(kinds, list) and not _SCALARS.isdisjoint(kinds)):
            return True
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not _SCALARS.isdisjoint(kinds):
            return True
        return any([self._container_ends(kind, node) for kind in kinds])

    def _container_ends(self, kind: Any, node: dict[str, Any]) -> bool:
        if kind == "object":
            properties, required = node.get("properties"), node.get("required")
            if not isinstance(properties, dict) or not isinstance(required, list):
                return True
            return all([self.ends(properties.get(name)) for name in required if name in properties])
        least, first = node.get("minItems", 0), node.get("prefixItems")
        first = first if isinstance(first, list) else []
        if not isinstance(least, int) or least < 1:
            return True
        return all([self.ends(one) for one in first[:least]]) and (
            least <= len(first) or self.ends(node.get("items"))
        )

    def _reference_ends(self, reference: str) -> bool:
        if reference in self.known or not reference.startswith("#"):
            return True
        if reference in self._open:
            return False
        self._open.add(reference)
        ends = self.ends(target(self.root, reference))
        self._open.discard(reference)
        if ends:
            self.new.add(reference)
        return ends


def target(root: Any, reference: str) -> Any:
    """What a reference within the schema `root` points to; None where that is nothing."""
    if not reference.startswith("#"):
        return None
    node = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node
