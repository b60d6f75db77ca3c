"""Validation of what a mask cannot express, as soon as a value is complete (with jsonschema-rs)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs

from anydecode.constraints.byte_cache import ByteCache, text_bytes
from anydecode.constraints.json.relaxing import (
    FORMATS,
    INEXACT_FORMATS,
    UNMASKED,
    is_format,
    is_pattern,
    subschemas,
)
from anydecode.constraints.patterns import abbreviated, pattern_options
from anydecode.errors import ConstraintError, one_line
from anydecode.models.tokenizer import Tokenizer

#: If the schema has more characters than this, only complete answers are validated.
_MAX_CHARACTERS_INCREMENTAL = 200_000
#: Maximum size of the sets of pointers that a validator caches, in bytes, and the estimated size of
#: one pointer.
_MAX_CACHED_BYTES, _BYTES_PER_POINTER = 4 << 20, 200
_OBJECT, _ARRAY = ord("{"), ord("[")
_SCALAR_ENDS = frozenset(b",]} \t\r\n")


class Validator:
    """The validators of a schema: for complete answers and for the values in them.

    Args:
        schema: A JSON schema.
        size: The length of its text, in characters.
        resources: Other schemas by URI, for references.

    Raises:
        ConstraintError: The schema is not valid, or its patterns are too expensive.
    """

    def __init__(self, schema: Any, size: int, resources: Mapping[str, Any] | None = None) -> None:
        self.schema = schema
        self._resources = dict(resources or {})
        self._build()
        # Inside a subschema with an identifier, "#/..." refers to another root.
        has_identifiers = any(
            "$id" in node or "id" in node for path, node in subschemas(schema) if path != "#"
        )
        self._incremental = size <= _MAX_CHARACTERS_INCREMENTAL and not has_identifiers
        #: All items of an array from this index on are under the same subschemas.
        self._num_prefix_items = max(
            (
                len(node["prefixItems"])
                for _, node in subschemas(schema)
                if isinstance(node.get("prefixItems"), list)
            ),
            default=0,
        )
        self._clear()

    def _clear(self) -> None:
        """Drops what `root`, `child` and `unmasked` have found."""
        self._root_pointers: frozenset[str] | None = None
        self._children: ByteCache[Any, frozenset[str]] = ByteCache(_MAX_CACHED_BYTES)
        self._unmasked: ByteCache[frozenset[str], list[str]] = ByteCache(_MAX_CACHED_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        dropped = {"_options", "_root", "_subschema_validators", "_children", "_unmasked"}
        return {name: value for name, value in vars(self).items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _root=None, _subschema_validators=None)
        self._clear()

    def build(self) -> None:
        """Builds the validators of the values in an answer now instead of at the first of them."""
        if self._root is None:
            self._build()
        if self._incremental:
            self._validators()

    def _build(self) -> None:
        """Builds the root's validator, which checks the schema."""
        self._subschema_validators: Any = None
        self._options: dict[str, Any] = {
            "validate_formats": True,
            "ignore_unknown_formats": True,
            "pattern_options": pattern_options(self.schema, *self._resources.values()),
            "offline": True,
        }
        try:
            if self._resources:
                registry = jsonschema_rs.Registry(list(self._resources.items()))
                self._options["registry"] = registry
            self._root: Any = jsonschema_rs.validator_for(self.schema, **self._options)
        except Exception as error:  # the library raises its own errors and ValueError
            raise ConstraintError(f"the schema is not valid: {_message(error)}") from None

    def _validators(self) -> Any:
        """The validators of the subschemas by their JSON pointers."""
        if self._root is None:
            self._build()
        if self._subschema_validators is None:
            self._subschema_validators = jsonschema_rs.validator_map_for(
                self.schema, **self._options
            )
        return self._subschema_validators

    def is_valid(self, value: Any) -> bool:
        """Whether a complete answer is valid."""
        if self._root is None:  # the validator is a pickle's, which has only the schema
            self._build()
        return _is_valid(self._root, value)

    def is_value_valid(self, pointers: frozenset[str], value: Any) -> bool:
        """Whether a value is valid under those subschemas at `pointers` that a mask cannot
        express."""
        if not self._incremental:
            return True
        checked_pointers = self.unmasked(pointers)
        if not checked_pointers:
            return True
        validators = self._validators()
        parts = [validators.get(pointer) for pointer in checked_pointers]
        return all(part is None or _is_valid(part, value) for part in parts)

    def root(self) -> frozenset[str]:
        """JSON pointers of the subschemas that apply to the whole answer."""
        if self._root_pointers is None:
            self._root_pointers = self._expanded({"#"})
        return self._root_pointers

    def child(self, pointers: frozenset[str], key: str | int) -> frozenset[str]:
        """JSON pointers of the subschemas that certainly apply to the member `key` of a value to
        which those at `pointers` apply."""
        if isinstance(key, int):
            key = min(key, self._num_prefix_items)
        found = self._children.get((pointers, key))
        if found is None:
            result: set[str] = set()
            for pointer in pointers:
                result.update(self._members(pointer, key))
            found = self._expanded(result)
            size = _BYTES_PER_POINTER * (len(pointers) + len(found)) + text_bytes(key)
            self._children.put((pointers, key), found, size)
        return found

    def unmasked(self, pointers: frozenset[str]) -> list[str]:
        """Those of `pointers` whose subschemas a mask cannot express."""
        found = self._unmasked.get(pointers)
        if found is None:
            found = [pointer for pointer in pointers if _is_unmasked(self.node(pointer))]
            self._unmasked.put(pointers, found, _BYTES_PER_POINTER * len(pointers))
        return found

    def _members(self, pointer: str, key: str | int) -> Iterator[str]:
        node = self.node(pointer)
        if (
            not isinstance(node, dict) or "$ref" in node
        ):  # siblings of $ref apply in some drafts only
            return
        if isinstance(key, str):
            properties = node.get("properties", {})
            if isinstance(properties, dict) and key in properties:
                yield f"{pointer}/properties/{_escaped(key)}"
            elif "patternProperties" not in node and "additionalProperties" in node:
                yield f"{pointer}/additionalProperties"
            return
        prefix_items = node.get("prefixItems", [])
        items = node.get("items")
        if key < len(prefix_items):
            yield f"{pointer}/prefixItems/{key}"
        elif isinstance(items, dict):
            yield f"{pointer}/items"

    def _expanded(self, pointers: set[str]) -> frozenset[str]:
        result: set[str] = set()
        stack = list(pointers)
        while stack:
            pointer = stack.pop()
            if pointer in result:
                continue
            result.add(pointer)
            node = self.node(pointer)
            if isinstance(node, dict):
                reference = node.get("$ref")
                if isinstance(reference, str) and reference.startswith("#/"):
                    stack.append(reference)
                parts = node.get("allOf", ())
                stack += [f"{pointer}/allOf/{i}" for i in range(len(parts))]
        return frozenset(result)

    def node(self, pointer: str) -> Any:
        """The subschema at a JSON pointer; None if there is none."""
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
    """An open array or object: its start in bytes, the pointers of the subschemas that apply to it,
    its opening bracket, and the key of its open member."""

    start: int
    pointers: frozenset[str]
    kind: int
    key: str | int = 0
    expects_key: bool = False


@dataclass
class IncrementalJsonValidator:
    """Scans a JSON text byte by byte and validates each value as soon as it is complete."""

    validator: Validator
    tokenizer: Tokenizer
    text: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)  # of each token's first byte
    stack: list[_Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = -1  # offset of an open string or other scalar
        self._quoted = False
        self._escaped = False

    def push(self, token: int) -> int | None:
        """Appends `token`. Returns None if no value completed by it is invalid, else the number of
        tokens before the invalid value."""
        self.offsets.append(len(self.text))
        for byte in self.tokenizer.token_bytes(token):
            start = self._step(byte)
            if start is not None:
                return self._tokens_before(start)
        return None

    def end(self) -> int | None:
        """Validates the complete text. Returns the same as `push`."""
        try:
            value = json.loads(bytes(self.text))
        except ValueError:
            return 0
        return None if self.validator.is_valid(value) else 0

    def _tokens_before(self, start: int) -> int:
        """The number of tokens that end at or before the byte offset `start`."""
        num_tokens = len(self.offsets)
        while num_tokens and self._token_end(num_tokens - 1) > start:
            num_tokens -= 1
        return num_tokens

    def _token_end(self, index: int) -> int:
        return self.offsets[index + 1] if index + 1 < len(self.offsets) else len(self.text)

    def _step(self, byte: int) -> int | None:
        invalid_start = None
        if self._start >= 0 and not self._quoted and byte in _SCALAR_ENDS:
            start, self._start = self._start, -1
            if not self._is_value_valid(start, self._current_pointers(), len(self.text)):
                invalid_start = start
        self.text.append(byte)
        if invalid_start is not None:
            return invalid_start
        if self._quoted:
            return self._in_string(byte)
        if byte in (_OBJECT, _ARRAY):
            key: str | int = "" if byte == _OBJECT else 0
            frame = _Frame(len(self.text) - 1, self._current_pointers(), byte, key, byte == _OBJECT)
            self.stack.append(frame)
        elif byte in b"}]":
            if self.stack:
                frame = self.stack.pop()
                if not self._is_value_valid(frame.start, frame.pointers, len(self.text)):
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
                frame.key = str(_parse_json(bytes(self.text[start:])))
            elif not self._is_value_valid(start, self._current_pointers(), len(self.text)):
                return start
        return None

    def _current_pointers(self) -> frozenset[str]:
        """The pointers of the subschemas that apply to a value that starts here."""
        if not self.stack:
            return self.validator.root()
        return self.validator.child(self.stack[-1].pointers, self.stack[-1].key)

    def _is_value_valid(self, start: int, pointers: frozenset[str], stop: int) -> bool:
        if not self.validator.unmasked(pointers):
            return True
        value = _parse_json(bytes(self.text[start:stop]))
        return value is not _INVALID_JSON and self.validator.is_value_valid(pointers, value)


_INVALID_JSON = object()


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _INVALID_JSON


def _is_unmasked(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    return (
        not UNMASKED.isdisjoint(node)
        or "oneOf" in node
        or ("format" in node and _is_unmasked_format(node["format"]))
        or ("pattern" in node and not is_pattern(node["pattern"]))
    )


def _is_unmasked_format(name: Any) -> bool:
    return is_format(name) and (name not in FORMATS or name in INEXACT_FORMATS)


def _is_valid(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except Exception:  # e.g. too many steps for a pattern: not known to be valid
        return False


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _message(error: BaseException) -> str:
    path = getattr(error, "instance_path", None)
    location = "#/" + "/".join(map(str, path))[:100] if path else "#"
    if getattr(getattr(error, "kind", None), "format", None) == "regex":
        return (
            f"the pattern {abbreviated(getattr(error, 'instance', ''))} cannot be compiled: it is"
            " not a regular expression of ECMA-262, or too large, or nests too deep"
            f" (at {location})"
        )
    return f"{one_line(getattr(error, 'message', error))} (at {location})"
