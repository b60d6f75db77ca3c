"""Hints for shortest completions, read from a JSON schema: required names and small values.

Hints are candidates only: the search checks each of them against the mask.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Set
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from anydecode.constraints.grammar.byte_regex import Expression, read_regex
from anydecode.constraints.json.relaxing import subschemas, without_assertions
from anydecode.constraints.json.termination import resolve_reference
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Maximum number of values, and their maximum length in bytes.
_MAX_VALUES = 128
_MAX_LENGTH = 256
#: Maximum number of parts of a pattern for which an example is generated.
_MAX_PARTS = 20_000
#: Values tried for every schema.
_BASIC = (b"0", b"1", b'""', b'"0"', b"[]", b"{}", b"null", b"true")
#: A short value of each format whose shortest value is long for a search by characters.
_FORMAT_VALUES = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P0D",
    "email": "a@a",
    "ipv4": "0.0.0.0",
    "ipv6": "::",
    "time": "00:00:00Z",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
#: Keywords for people.
_TEXTS = ("title", "description", "$comment")
#: Maximum nesting depth for estimates of a value's size.
_MAX_SIZE_DEPTH = 6


class _Object(NamedTuple):
    """The properties of one object: the estimated size of the smallest value of each, in order, and
    the required names."""

    sizes: dict[str, int]
    required: frozenset[str]


class SchemaHints:
    """Names and values of a schema, computed on first use.

    `shortest` caches, by tokenizer, the tokens of the shortest complete text; none if none was
    found.
    """

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self.string_ends: tuple[bytes, ...] = ()  # strings of JSON have quotes
        self._sizes: dict[tuple[int, int], int] = {}
        self.shortest: WeakKeyDictionary[Tokenizer, array[int]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Sizes are kept by the identity of their schema, and lengths by the tokenizer's.
        return {**vars(self), "_sizes": {}, "shortest": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, shortest=WeakKeyDictionary())

    @cached_property
    def values(self) -> list[bytes]:
        """Small values as JSON text, the shortest first."""
        result = set(_BASIC)
        for _, node in subschemas(self._root):
            result.update(_small_values(node))
        patterned = (
            node for _, node in subschemas(self._root) if isinstance(node.get("pattern"), str)
        )
        for node in islice(patterned, _MAX_VALUES):
            text = example(node["pattern"])
            if text is not None:
                result.add(_text(text.ljust(_count(node, "minLength"), text[-1:] or "0")))
        ordered = sorted(result, key=lambda value: (len(value), value))[:_MAX_VALUES]
        return [value for value in ordered if len(value) <= _MAX_LENGTH]

    @cached_property
    def names(self) -> dict[str, bytes]:
        """Property names as JSON text with quotes and a colon, by name."""
        names = (name for entry in self._objects for name in entry.sizes)
        return {name: _text(name) + b":" for name in names}

    @cached_property
    def longest_text(self) -> int:
        """The length of the longest name, constant or pattern, in characters."""
        longest, stack = 0, [self._root]
        while stack:
            node = stack.pop()
            if isinstance(node, str):
                longest = max(longest, len(node))
            elif isinstance(node, dict):
                longest = max(longest, max(map(len, node), default=0))
                stack += (value for key, value in node.items() if key not in _TEXTS)
            elif isinstance(node, list):
                stack += node
        return longest

    @cached_property
    def _objects(self) -> list[_Object]:
        result: dict[Any, _Object] = {}
        for _, node in subschemas(self._root):
            description = self._object(node)
            if description.sizes:
                key = frozenset(description.sizes.items()), description.required
                result.setdefault(key, description)
        return sorted(result.values(), key=lambda entry: len(entry.sizes))

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset[str]().union(*(entry.required for entry in self._objects))

    def may_force(self, text: str) -> bool:
        """Whether `text` may be completed by force: always."""
        return True

    def ordered(self, allowed: Set[str]) -> list[str]:
        """The names `allowed`, sorted so that those that complete an object soonest come first.
        Properties are generated in order, so the last required name comes first; names that are
        not required are sorted by the size of their value."""
        description = self._objects[self._best_object(allowed)]
        position = {name: index for index, name in enumerate(description.sizes)}

        def rank(name: str) -> tuple[int, int]:
            if name in description.required:
                return 0, -position[name]
            if name in self._required:
                return 1, -position.get(name, -1)
            return 2, description.sizes.get(name, _MAX_LENGTH)

        return sorted(allowed, key=rank)

    def _best_object(self, allowed: Set[str]) -> int:
        """The index of the first object with the largest number of the names `allowed`."""
        counts = Counter(index for name in allowed for index in self._indices_by_name.get(name, ()))
        return min(counts, key=lambda index: (-counts[index], index), default=0)

    @cached_property
    def _indices_by_name(self) -> dict[str, list[int]]:
        result: dict[str, list[int]] = {}
        for index, entry in enumerate(self._objects):
            for name in entry.sizes:
                result.setdefault(name, []).append(index)
        return result

    def compute(self) -> None:
        """Computes everything now instead of on first use."""
        _ = self.values, self.names, self._required, self._indices_by_name

    def _object(self, node: dict[str, Any]) -> _Object:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required_names = [value for value in _list(node.get("required")) if isinstance(value, str)]
        sizes = {name: self._size(value, 0) for name, value in properties.items()}
        for name in required_names:
            sizes.setdefault(name, 2)
        by_pattern = node.get("patternProperties")
        if isinstance(by_pattern, dict):
            for pattern, value in islice(by_pattern.items(), _MAX_VALUES):
                text = example(pattern)
                if text is not None:
                    sizes.setdefault(text, self._size(value, 0))
        return _Object(sizes, frozenset(required_names))

    def _size(self, node: Any, depth: int) -> int:
        """The estimated length of the smallest value under `node`, in characters."""
        if not isinstance(node, dict) or depth > _MAX_SIZE_DEPTH:
            return 2
        key = id(node), depth
        if key not in self._sizes:
            self._sizes[key] = self._compute_size(node, depth)
        return self._sizes[key]

    def _compute_size(self, node: dict[str, Any], depth: int) -> int:
        if "const" in node:
            return len(json.dumps(node["const"]))
        if _list(node.get("enum")):
            return min(len(json.dumps(value)) for value in node["enum"])
        reference = node.get("$ref")
        size = self._type_size(node, depth)
        if isinstance(reference, str):
            size += self._size(resolve_reference(self._root, reference), depth + 1)
        size += sum(self._size(value, depth + 1) for value in _list(node.get("allOf")))
        for key in ("anyOf", "oneOf"):
            size += min((self._size(value, depth + 1) for value in _list(node.get(key))), default=0)
        return size

    def _type_size(self, node: dict[str, Any], depth: int) -> int:
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
    """Small values that are valid under `node`, or likely to be, as JSON text."""
    for value in [*_list(node.get("enum")), *([node["const"]] if "const" in node else [])]:
        yield _text(value)
    kind = node.get("format")
    if isinstance(kind, str) and kind in _FORMAT_VALUES:
        yield _text(_FORMAT_VALUES[kind])
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
    return min(int(max(0, _number(node.get(key)) or 0)), _MAX_LENGTH)


def _number(value: Any) -> int | float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e15 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def example(pattern: str) -> str | None:
    """A short text that the regular expression `pattern` matches; None if it is not supported."""
    relaxed = without_assertions(pattern) or pattern
    without_anchors = _ANCHORS.sub(lambda match: match[0] if len(match[0]) > 1 else "", relaxed)
    try:
        return _shortest(read_regex(without_anchors, max_parts=_MAX_PARTS)).decode()
    except (ConstraintError, UnicodeDecodeError, RecursionError):
        return None


#: Anchors, and the escapes and classes in which the same characters are literal.
_ANCHORS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|[\^$]", re.DOTALL)
#: Bytes in the order in which examples prefer them.
_PREFERRED_BYTES = [*b"0aA-._/:@ ", *range(33, 127), *range(256)]


def _shortest(part: Expression) -> bytes:
    kind, inner = part
    if kind == "set":
        return bytes([next(byte for byte in _PREFERRED_BYTES if inner >> byte & 1)])
    if kind == "seq":
        return b"".join(map(_shortest, inner))
    if kind == "alt":
        return min(map(_shortest, inner), key=len)
    return b""
