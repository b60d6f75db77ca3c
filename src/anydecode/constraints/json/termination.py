"""Detection of recursive schemas that no finite value satisfies."""

from __future__ import annotations

from typing import Any

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def cannot_terminate(schema: Any) -> bool:
    """Whether every value valid under `schema` would be infinite. Only references within the schema
    are followed; constructs that are not recognised count as finite."""
    terminating: set[str] = set()
    while True:
        fixed_point_round = _Round(schema, terminating)
        terminates = fixed_point_round.terminates(schema)
        if terminates or not fixed_point_round.newly_found:
            return not terminates
        terminating |= fixed_point_round.newly_found


class _Round:
    """One iteration of the fixed point: which references have finite values, given those already
    found. Each reference is followed once."""

    def __init__(self, root: Any, terminating: set[str]) -> None:
        self.root = root
        self.terminating = terminating
        self.newly_found: set[str] = set()
        self._visited: set[str] = set()

    def terminates(self, node: Any) -> bool:
        if not isinstance(node, dict) or "enum" in node or "const" in node:
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and not self._reference_terminates(reference):
            return False
        parts = node.get("allOf")
        if isinstance(parts, list) and not all([self.terminates(part) for part in parts]):
            return False
        for key in ("anyOf", "oneOf"):
            options = node.get(key)
            if (
                isinstance(options, list)
                and options
                and not any(list(map(self.terminates, options)))
            ):
                return False
        return self._type_terminates(node)

    def _type_terminates(self, node: dict[str, Any]) -> bool:
        types = node.get("type")
        if types is None or (isinstance(types, list) and not _SCALARS.isdisjoint(types)):
            return True
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not _SCALARS.isdisjoint(types):
            return True
        return any([self._container_terminates(type_name, node) for type_name in types])

    def _container_terminates(self, type_name: Any, node: dict[str, Any]) -> bool:
        if type_name == "object":
            properties, required = node.get("properties"), node.get("required")
            if not isinstance(properties, dict) or not isinstance(required, list):
                return True
            return all(
                [self.terminates(properties.get(name)) for name in required if name in properties]
            )
        min_items, prefix_items = node.get("minItems", 0), node.get("prefixItems")
        prefix_items = prefix_items if isinstance(prefix_items, list) else []
        if not isinstance(min_items, int) or min_items < 1:
            return True
        return all([self.terminates(item) for item in prefix_items[:min_items]]) and (
            min_items <= len(prefix_items) or self.terminates(node.get("items"))
        )

    def _reference_terminates(self, reference: str) -> bool:
        if reference in self.terminating or not reference.startswith("#"):
            return True
        if reference in self._visited:
            return reference in self.newly_found
        self._visited.add(reference)
        terminates = self.terminates(resolve_reference(self.root, reference))
        if terminates:
            self.newly_found.add(reference)
        return terminates


def resolve_reference(root: Any, reference: str) -> Any:
    """The subschema that a reference within the schema `root` points to; None if there is none."""
    if not reference.startswith("#"):
        return None
    node = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node
