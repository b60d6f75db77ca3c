"""Which values of an answer must be complete before they are known to be valid.

The mask expresses most of a schema exactly. A value is held back only if a keyword that the mask
leaves out applies to it as a whole. It is enough to look at the subschemas that certainly apply to
the value: those of the members are looked at when the members start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anydecode.constraints.json.relaxing import pointer_part, subschemas
from anydecode.constraints.json.wide_objects import is_wide

#: The type of a JSON value by its first byte.
_TYPES = {ord("{"): "object", ord("["): "array", ord('"'): "string", ord("n"): "null"}
_TYPES |= dict.fromkeys(b"tf", "boolean") | dict.fromkeys(b"-0123456789", "number")
#: The type of the values that a keyword restricts; other keywords restrict values of every type.
_RESTRICTED_TYPES = {
    **dict.fromkeys(
        ("uniqueItems", "contains", "minContains", "maxContains", "items", "prefixItems",
         "additionalItems", "unevaluatedItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("format", "pattern", "minLength", "maxLength"), "string"),
    **dict.fromkeys(
        ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
         "propertyNames", "minProperties", "maxProperties", "required", "dependentRequired",
         "dependentSchemas", "dependencies"), "object"),
}  # fmt: skip
#: Keywords whose subschemas are looked at when the members they apply to start, and keywords whose
#: subschemas apply to nothing by themselves.
_MEMBERS = frozenset({"properties", "additionalProperties", "prefixItems", "items"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ALTERNATIVES = ("anyOf", "oneOf")
#: Maximum number of references and combinations that are followed to find the types of a subschema.
_MAX_STEPS = 64


def value_type(first_byte: int) -> str | None:
    """The JSON type of a value that starts with `first_byte`; "number" for integers too."""
    return _TYPES.get(first_byte)


def countable_properties(schema: Any) -> Iterator[str]:
    """The objects of which a mask counts a name that is written twice as two properties, so that
    they may have too few, as "minProperties at #/path"."""
    for path, node in subschemas(schema):
        required = node.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
        is_open = is_open or is_wide(node)
        if is_open and _number(node.get("minProperties")) > num_required + 1:
            yield f"minProperties at {path}"


class HeldValues:
    """Decides which values are held back.

    Args:
        schema: The schema that the mask was made from, with the keywords that it leaves out.
        dropped: These keywords, as "keyword at #/path".
        node: The subschema of `schema` at a JSON pointer; None if there is none.
    """

    def __init__(self, schema: Any, dropped: list[str], node: Callable[[str], Any]) -> None:
        self._node = node
        self._dropped: dict[str, set[str]] = {}
        for entry in dropped:
            keyword, _, path = entry.partition(" at ")
            self._dropped.setdefault(path, set()).add(keyword)
        self._inexact = self._find_inexact(schema)

    def is_held(self, pointer: str, type_name: str | None) -> bool:
        """Whether a value of this type may be invalid under the subschema at `pointer` for another
        reason than an invalid member."""
        if self._restricts(pointer, type_name):
            return True
        node = self._node(pointer)
        if not isinstance(node, dict):
            return False
        for key in _ALTERNATIVES:
            possible = self.possible(pointer, key, type_name)
            if len(possible) > 1 and not self._inexact.isdisjoint(possible):
                return True
        return any(
            path in self._inexact
            for key, path in _children(pointer, node)
            if key not in _ALTERNATIVES and not _is_followed(key, node)
        ) or ("$ref" in node and local_pointer(node["$ref"]) is None)

    def possible(self, pointer: str, key: str, type_name: str | None) -> list[str]:
        """Pointers of the alternatives under `key` that a value of this type can satisfy. If there
        is only one, it certainly applies."""
        node = self._node(pointer)
        options = node.get(key) if isinstance(node, dict) else None
        if not isinstance(options, list):
            return []
        paths = [f"{pointer}/{key}/{i}" for i in range(len(options))]
        return [path for path in paths if self._can_be(path, type_name)]

    def _restricts(self, pointer: str, type_name: str | None) -> bool:
        """Whether a dropped keyword of this subschema applies to values of this type."""
        return any(
            type_name is None or _RESTRICTED_TYPES.get(keyword, type_name) == type_name
            for keyword in self._dropped.get(pointer, ())
        )

    def _can_be(self, pointer: str, type_name: str | None) -> bool:
        """Whether a value of this type may be valid under the subschema at `pointer`."""
        stack, num_steps = [pointer], 0
        while stack and num_steps < _MAX_STEPS:
            num_steps += 1
            path = stack.pop()
            node = self._node(path)
            if node is False:
                return False
            if not isinstance(node, dict) or type_name is None:
                continue
            types = node.get("type")
            if types is not None and type_name not in _type_names(types):
                return False
            values = [node["const"]] if "const" in node else node.get("enum")
            if isinstance(values, list) and type_name not in map(_type_of, values):
                return False
            reference = local_pointer(node.get("$ref"))
            stack += [] if reference is None else [reference]
            stack += [f"{path}/allOf/{i}" for i in range(len(node.get("allOf") or ()))]
        return True

    def _find_inexact(self, schema: Any) -> set[str]:
        """Pointers of the subschemas that contain, also through references, a dropped keyword."""
        users: dict[str, list[str]] = {}
        found: list[str] = []
        for path, node in subschemas(schema):
            if path in self._dropped:
                found.append(path)
            if "$ref" in node:
                reference = local_pointer(node["$ref"])
                if reference is None or self._node(reference) is None:
                    found.append(path)
                else:
                    users.setdefault(reference, []).append(path)
            for _, child in _children(path, node):
                users.setdefault(child, []).append(path)
        found += [path for path in self._dropped if path not in found]
        inexact: set[str] = set()
        while found:
            path = found.pop()
            if path not in inexact:
                inexact.add(path)
                found += users.get(path, ())
        return inexact


def local_pointer(reference: Any) -> str | None:
    """The JSON pointer that a reference within the schema is; None for other references."""
    if not isinstance(reference, str) or "%" in reference:
        return None
    return reference if reference == "#" or reference.startswith("#/") else None


def _is_followed(key: str, node: Mapping[str, Any]) -> bool:
    """Whether the subschemas under `key` are looked at by themselves."""
    if key == "allOf":
        return True
    if key not in _MEMBERS or "$ref" in node:
        return False
    if key == "additionalProperties":
        return "patternProperties" not in node
    return key != "items" or isinstance(node[key], dict)


def _children(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The subschemas directly below a subschema that apply to its value or to members of it: their
    keyword and pointer."""
    for key, value in node.items():
        if key in _DEFINITIONS:
            continue
        subpath = f"{path}/{pointer_part(key)}"
        if isinstance(value, dict):
            yield key, subpath
            yield from ((key, f"{subpath}/{pointer_part(name)}") for name in value)
        elif isinstance(value, list):
            yield from ((key, f"{subpath}/{i}") for i in range(len(value)))


def _type_names(types: Any) -> set[str]:
    names = {types} if isinstance(types, str) else set(types)
    return names | ({"number"} if "integer" in names else set())


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0
