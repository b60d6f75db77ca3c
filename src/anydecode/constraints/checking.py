"""What a mask cannot express, checked as soon as a value closes (validator: jsonschema-rs)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs

from anydecode.constraints.guidance_engine import one_line
from anydecode.constraints.patterns import pattern_options, shown
from anydecode.constraints.relaxing import FORMATS, UNMASKED, is_format, is_pattern, nodes
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Beyond this many characters of schema, only whole answers are checked.
_LARGE = 200_000
_OBJECT, _ARRAY = ord("{"), ord("[")
_SCALAR_ENDS = frozenset(b",]} \t\r\n")


class Validator:
    """A schema's validators: of whole answers, and of values at known places."""

    def __init__(self, schema: Any, size: int, resources: Mapping[str, Any] | None = None) -> None:
        self.schema = schema
        self._options: dict[str, Any] = {
            "validate_formats": True,
            "ignore_unknown_formats": True,
            "pattern_options": pattern_options(schema, *(resources or {}).values()),
            "offline": True,
        }
        try:
            if resources:
                registry = jsonschema_rs.Registry(list(resources.items()))
                self._options["registry"] = registry
            self._whole = jsonschema_rs.validator_for(schema, **self._options)
        except Exception as error:  # the library raises its own errors and ValueError
            raise ConstraintError(f"the schema is not valid: {_message(error)}") from None
        self._map = jsonschema_rs.validator_map_for
        self._parts: Any = None
        # Inside a part with an identifier of its own, "#/..." means another root.
        own = any("$id" in node or "id" in node for path, node in nodes(schema) if path != "#")
        self._early = size <= _LARGE and not own

    def is_valid(self, value: Any) -> bool:
        """Whether a whole answer is valid."""
        return _holds(self._whole, value)

    def closes(self, pointers: frozenset[str], value: Any) -> bool:
        """Whether a value meets the subschemas that apply to it and say what no mask can."""
        if not self._early:
            return True
        told = [pointer for pointer in pointers if _is_unmasked(self.node(pointer))]
        if not told:
            return True
        if self._parts is None:
            self._parts = self._map(self.schema, **self._options)
        parts = [self._parts.get(pointer) for pointer in told]
        return all(part is None or _holds(part, value) for part in parts)

    def root(self) -> frozenset[str]:
        """The subschemas that apply to the whole answer."""
        return self._expanded({"#"})

    def child(self, pointers: frozenset[str], key: str | int) -> frozenset[str]:
        """The subschemas that surely apply to the member `key` of a value under `pointers`."""
        found: set[str] = set()
        for pointer in pointers:
            found.update(self._members(pointer, key))
        return self._expanded(found)

    def _members(self, pointer: str, key: str | int) -> Iterator[str]:
        node = self.node(pointer)
        if not isinstance(node, dict) or "$ref" in node:  # its siblings count in some drafts only
            return
        if isinstance(key, str):
            properties = node.get("properties", {})
            if isinstance(properties, dict) and key in properties:
                yield f"{pointer}/properties/{_escaped(key)}"
            elif "patternProperties" not in node and "additionalProperties" in node:
                yield f"{pointer}/additionalProperties"
            return
        first = node.get("prefixItems", [])
        items = node.get("items")
        if key < len(first):
            yield f"{pointer}/prefixItems/{key}"
        elif isinstance(items, dict):
            yield f"{pointer}/items"

    def _expanded(self, pointers: set[str]) -> frozenset[str]:
        found: set[str] = set()
        waiting = list(pointers)
        while waiting:
            pointer = waiting.pop()
            if pointer in found:
                continue
            found.add(pointer)
            node = self.node(pointer)
            if isinstance(node, dict):
                reference = node.get("$ref")
                if isinstance(reference, str) and reference.startswith("#/"):
                    waiting.append(reference)
                parts = node.get("allOf", ())
                waiting += [f"{pointer}/allOf/{i}" for i in range(len(parts))]
        return frozenset(found)

    def node(self, pointer: str) -> Any:
        """The subschema at a JSON pointer; None where there is none."""
        node = self.schema
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node


@dataclass
class _Frame:
    """An open value: where it starts, what applies to it, and the key of its open member."""

    start: int
    pointers: frozenset[str]
    kind: int
    key: str | int = 0
    expects_key: bool = False


@dataclass
class IncrementalJsonValidator:
    """Follows a JSON text byte by byte and validates each value as it closes."""

    validator: Validator
    tokenizer: Tokenizer
    text: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)  # where each token begins
    stack: list[_Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = -1  # of an open string or other scalar
        self._quoted = False
        self._escaped = False

    def push(self, token: int) -> int | None:
        """How many tokens to keep where a value that has just closed is wrong, else None."""
        self.offsets.append(len(self.text))
        for byte in self.tokenizer.token_bytes(token):
            start = self._step(byte)
            if start is not None:
                return self._tokens_before(start)
        return None

    def end(self) -> int | None:
        """The same for the whole text."""
        try:
            value = json.loads(bytes(self.text))
        except ValueError:
            return 0
        return None if self.validator.is_valid(value) else 0

    def _tokens_before(self, start: int) -> int:
        """Tokens that end at or before `start`."""
        kept = len(self.offsets)
        while kept and self._end_of(kept - 1) > start:
            kept -= 1
        return kept

    def _end_of(self, number: int) -> int:
        return self.offsets[number + 1] if number + 1 < len(self.offsets) else len(self.text)

    def _step(self, byte: int) -> int | None:
        wrong = None
        if self._start >= 0 and not self._quoted and byte in _SCALAR_ENDS:
            start, self._start = self._start, -1
            if not self._closes(start, self._applying(), len(self.text)):
                wrong = start
        self.text.append(byte)
        if wrong is not None:
            return wrong
        if self._quoted:
            return self._in_string(byte)
        if byte in (_OBJECT, _ARRAY):
            key: str | int = "" if byte == _OBJECT else 0
            frame = _Frame(len(self.text) - 1, self._applying(), byte, key, byte == _OBJECT)
            self.stack.append(frame)
        elif byte in b"}]":
            if self.stack:
                frame = self.stack.pop()
                if not self._closes(frame.start, frame.pointers, len(self.text)):
                    return frame.start
        elif byte == ord(","):
            if self.stack and self.stack[-1].kind == _ARRAY:
                self.stack[-1].key = int(self.stack[-1].key) + 1
            elif self.stack:
                self.stack[-1].expects_key = True
        elif byte == ord('"'):
            self._start, self._quoted = len(self.text) - 1, True
        elif self._start < 0 and byte not in b": \t\r\n":
            self._start = len(self.text) - 1
        return None

    def _in_string(self, byte: int) -> int | None:
        if self._escaped:
            self._escaped = False
        elif byte == ord("\\"):
            self._escaped = True
        elif byte == ord('"'):
            start, self._start, self._quoted = self._start, -1, False
            frame = self.stack[-1] if self.stack else None
            if frame is not None and frame.expects_key:
                frame.expects_key = False
                frame.key = str(_loaded(bytes(self.text[start:])))
            elif not self._closes(start, self._applying(), len(self.text)):
                return start
        return None

    def _applying(self) -> frozenset[str]:
        """The subschemas that apply to a value that begins here."""
        if not self.stack:
            return self.validator.root()
        return self.validator.child(self.stack[-1].pointers, self.stack[-1].key)

    def _closes(self, start: int, pointers: frozenset[str], stop: int) -> bool:
        if not any(_is_unmasked(self.validator.node(pointer)) for pointer in pointers):
            return True
        value = _loaded(bytes(self.text[start:stop]))
        return value is not _BROKEN and self.validator.closes(pointers, value)


_BROKEN = object()


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


def _is_unmasked(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    return (
        not UNMASKED.isdisjoint(node)
        or "oneOf" in node
        or ("format" in node and node["format"] not in FORMATS and is_format(node["format"]))
        or ("pattern" in node and not is_pattern(node["pattern"]))
    )


def _holds(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except Exception:  # a pattern that gave up has not shown the value to be valid
        return False


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _message(error: BaseException) -> str:
    path = getattr(error, "instance_path", None)
    where = "#/" + "/".join(map(str, path))[:100] if path else "#"
    if getattr(getattr(error, "kind", None), "format", None) == "regex":
        return (
            f"the pattern {shown(getattr(error, 'instance', ''))} cannot be compiled: it is not a"
            f" regular expression of ECMA-262, or too large, or nests too deep (at {where})"
        )
    return f"{one_line(getattr(error, 'message', error))} (at {where})"
