"""What a JSON schema tells of the short way to an end: which names are needed, and small values.

Only hints: whoever takes them asks the mask whether they are allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from anydecode.constraints.byte_regex import Expression, read_regex
from anydecode.constraints.relaxing import nodes, without_assertions
from anydecode.constraints.termination import target
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Most values that are proposed, and the longest of them in bytes.
_MOST_VALUES = 128
_LONGEST = 256
#: Parts that a pattern may have for a text of it to be proposed.
_MAX_PARTS = 20_000
#: Values that any schema may have.
_BASIC = (b"0", b"1", b'""', b'"0"', b"[]", b"{}", b"null", b"true")
#: How deep the size of a smallest value is looked for.
_DEEPEST = 6


class _Object(NamedTuple):
    """The names of one object: their order with the size of a smallest value, and who is needed."""

    sizes: dict[str, int]
    required: frozenset[str]


class Hints:
    """Names and values of a schema, read when first asked for. `shortest` is for whoever searches:
    the tokens of the shortest whole text, by tokenizer; None where none was found."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._known: dict[tuple[int, int], int] = {}
        self.shortest: WeakKeyDictionary[Tokenizer, int | None] = WeakKeyDictionary()

    @cached_property
    def values(self) -> list[bytes]:
        """Small values as text, the shortest first."""
        found = set(_BASIC)
        for _, node in nodes(self._root):
            found.update(_small_values(node))
        patterned = (node for _, node in nodes(self._root) if isinstance(node.get("pattern"), str))
        for node in islice(patterned, _MOST_VALUES):
            text = example(node["pattern"])
            if text is not None:
                found.add(_text(text.ljust(_count(node, "minLength"), text[-1:] or "0")))
        ordered = sorted(found, key=lambda value: (len(value), value))[:_MOST_VALUES]
        return [value for value in ordered if len(value) <= _LONGEST]

    @cached_property
    def names(self) -> dict[str, bytes]:
        """Names as text with quotes and a colon, by name."""
        every = (name for one in self._objects for name in one.sizes)
        return {name: _text(name) + b":" for name in every}

    @cached_property
    def _objects(self) -> list[_Object]:
        found: list[_Object] = []
        for _, node in nodes(self._root):
            own = self._object(node)
            if own.sizes and own not in found:
                found.append(own)
        return sorted(found, key=lambda one: len(one.sizes))

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset[str]().union(*(one.required for one in self._objects))

    def ordered(self, allowed: Set[str]) -> list[str]:
        """The names that may follow, those first with which an object ends soonest: properties come
        in order, so the last one is next where it is needed, and else a small one will do."""
        own = max(self._objects, key=lambda one: len(one.sizes.keys() & allowed))
        position = {name: number for number, name in enumerate(own.sizes)}

        def rank(name: str) -> tuple[int, int]:
            if name in own.required:
                return 0, -position[name]
            if name in self._required:
                return 1, -position.get(name, -1)
            return 2, own.sizes.get(name, _LONGEST)

        return sorted(allowed, key=rank)

    def _object(self, node: dict[str, Any]) -> _Object:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        needed = [one for one in _list(node.get("required")) if isinstance(one, str)]
        sizes = {name: self._size(one, 0) for name, one in properties.items()}
        for name in needed:
            sizes.setdefault(name, 2)
        return _Object(sizes, frozenset(needed))

    def _size(self, node: Any, depth: int) -> int:
        """About how long the smallest value under `node` is, in characters."""
        if not isinstance(node, dict) or depth > _DEEPEST:
            return 2
        key = id(node), depth
        if key not in self._known:
            self._known[key] = self._measured(node, depth)
        return self._known[key]

    def _measured(self, node: dict[str, Any], depth: int) -> int:
        if "const" in node:
            return len(json.dumps(node["const"]))
        if _list(node.get("enum")):
            return min(len(json.dumps(one)) for one in node["enum"])
        reference = node.get("$ref")
        size = self._own(node, depth)
        if isinstance(reference, str):
            size += self._size(target(self._root, reference), depth + 1)
        size += sum(self._size(one, depth + 1) for one in _list(node.get("allOf")))
        for key in ("anyOf", "oneOf"):
            size += min((self._size(one, depth + 1) for one in _list(node.get(key))), default=0)
        return size

    def _own(self, node: dict[str, Any], depth: int) -> int:
        kind = node.get("type")
        if kind == "object":
            properties = node.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            return 2 + sum(
                len(str(name)) + 4 + self._size(properties.get(name), depth + 1)
                for name in _list(node.get("required"))
            )
        if kind == "array":
            return 2 + _count(node, "minItems") * (1 + self._size(node.get("items"), depth + 1))
        return 2 + _count(node, "minLength")


def _small_values(node: dict[str, Any]) -> Iterator[bytes]:
    """Texts of small values that are valid under `node`, or likely to be."""
    for value in [*_list(node.get("enum")), *([node["const"]] if "const" in node else [])]:
        yield _text(value)
    if not isinstance(node.get("pattern"), str) and _count(node, "minLength") > 1:
        yield _text("-" * _count(node, "minLength"))  # a few tokens in most vocabularies
    yield from map(_text, _small_numbers(node))


def _small_numbers(node: dict[str, Any]) -> Iterator[int | float]:
    step = _number(node.get("multipleOf", 1))
    if step is None or step <= 0:
        return
    for key, direction in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1),
                           ("exclusiveMaximum", -1)):  # fmt: skip
        bound = _number(node.get(key))
        if bound is not None:
            count = direction * ceil(direction * bound / step)
            for value in (count * step, (count + direction) * step):
                yield int(value) if value == int(value) else value


def _count(node: dict[str, Any], key: str) -> int:
    return min(int(max(0, _number(node.get(key)) or 0)), _LONGEST)


def _number(value: Any) -> int | float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number and abs(value) < 1e15 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def example(pattern: str) -> str | None:
    """A short text that a regular expression matches, or None where it is not understood."""
    looser = without_assertions(pattern) or pattern
    plain = _ANCHORS.sub(lambda found: found[0] if len(found[0]) > 1 else "", looser)
    try:
        return _shortest(read_regex(plain, max_parts=_MAX_PARTS)).decode()
    except (ConstraintError, UnicodeDecodeError, RecursionError):
        return None


#: What anchors a pattern, beside escapes and classes, in which the same characters mean themselves.
_ANCHORS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[\^$]", re.DOTALL)
#: Bytes as they are best liked in an example.
_LIKED = [*b"0aA-._/:@ ", *range(33, 127), *range(256)]


def _shortest(part: Expression) -> bytes:
    kind, inner = part
    if kind == "set":
        return bytes([next(byte for byte in _LIKED if inner >> byte & 1)])
    if kind == "seq":
        return b"".join(map(_shortest, inner))
    if kind == "alt":
        return min(map(_shortest, inner), key=len)
    return b""
