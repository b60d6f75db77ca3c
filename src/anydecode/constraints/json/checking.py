"""Validation of what a mask cannot express, as soon as a value is complete (with jsonschema-rs)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import copysign, isfinite
from typing import Any

import jsonschema_rs

from anydecode.constraints.byte_cache import ByteCache, text_bytes
from anydecode.constraints.json.held_values import HeldValues, local_pointer, value_type
from anydecode.constraints.json.relaxing import (
    FORMATS,
    INEXACT_FORMATS,
    is_format,
    is_pattern,
    is_unmasked,
    pointer_part,
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
_TYPES = "array, boolean, integer, null, number, object, string"
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
        self._size = size
        self._resources = dict(resources or {})
        self._build()
        self._follow(schema)

    def _follow(self, schema: Any) -> None:
        """Sets the schema under which the values in an answer are validated."""
        self.value_schema = schema
        # Inside a subschema with an identifier, "#/..." refers to another root.
        has_identifiers = any(
            "$id" in node or "id" in node for path, node in subschemas(schema) if path != "#"
        )
        self._incremental = self._size <= _MAX_CHARACTERS_INCREMENTAL and not has_identifiers
        #: All items of an array from this index on are under the same subschemas.
        self._num_prefix_items = max(
            (
                len(node["prefixItems"])
                for _, node in subschemas(schema)
                if isinstance(node.get("prefixItems"), list)
            ),
            default=0,
        )
        self._held: HeldValues | None = None
        self._subschema_validators: Any = None
        self._clear()

    def release(self, schema: Any, dropped: list[str]) -> None:
        """Lets answers be sent up to the first value that is still to be validated. Without this
        call, an answer is valid only as a whole.

        Args:
            schema: A schema equivalent to that of the answer. A mask enforces it exactly, but for
                some keywords.
            dropped: These keywords, as "keyword at #/path".
        """
        self._follow(schema)
        if self._incremental:
            self._held = HeldValues(schema, dropped, self.node)

    def released(self, schema: Any, dropped: list[str]) -> Validator:
        """A copy of this validator, after `release`."""
        other: Validator = object.__new__(type(self))
        vars(other).update(vars(self))
        other.release(schema, dropped)
        return other

    @property
    def can_release(self) -> bool:
        """Whether a value that is complete and valid stays valid whatever follows it."""
        return self._held is not None

    @property
    def is_held_whole(self) -> bool:
        """Whether nothing of an answer is known to be valid before the answer is complete."""
        types = ("object", "array")
        return any(self.is_held(self.of_type(self.root(), name), name) for name in types)

    def _clear(self) -> None:
        """Drops what has been found for sets of pointers."""
        self._root_pointers: frozenset[str] | None = None
        self._children: ByteCache[Any, frozenset[str]] = ByteCache(_MAX_CACHED_BYTES)
        self._unmasked: ByteCache[frozenset[str], list[str]] = ByteCache(_MAX_CACHED_BYTES)
        self._held_pointers: ByteCache[Any, list[str]] = ByteCache(_MAX_CACHED_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        dropped = {
            "_options", "_root", "_subschema_validators", "_children", "_unmasked",
            "_held_pointers",
        }  # fmt: skip
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
                self.value_schema, **self._options
            )
        return self._subschema_validators

    def is_valid(self, value: Any) -> bool:
        """Whether a complete answer is valid."""
        if self._root is None:  # the validator is a pickle's, which has only the schema
            self._build()
        return _is_valid(self._root, value)

    def is_value_valid(self, pointers: frozenset[str], value: Any, type_name: str | None) -> bool:
        """Whether a value of this type is valid under those subschemas at `pointers` that a mask
        cannot express."""
        if not self._incremental:
            return True
        validators = self._validators()
        parts = [validators.get(pointer) for pointer in self.checked(pointers, type_name)]
        return all(part is None or _is_valid(part, value) for part in parts)

    def is_held(self, pointers: frozenset[str], type_name: str | None) -> bool:
        """Whether a value of this type under the subschemas at `pointers` is to be validated as a
        whole."""
        return self._held is None or bool(self._held_at(pointers, type_name))

    def checked(self, pointers: frozenset[str], type_name: str | None) -> list[str]:
        """Those of `pointers` under which a complete value of this type is validated."""
        unmasked = self.unmasked(pointers)
        return [*unmasked, *(p for p in self._held_at(pointers, type_name) if p not in unmasked)]

    def _held_at(self, pointers: frozenset[str], type_name: str | None) -> list[str]:
        """Those of `pointers` for which a value of this type is held."""
        held = self._held
        if held is None:
            return []
        found = self._held_pointers.get((pointers, type_name))
        if found is None:
            found = [pointer for pointer in pointers if held.is_held(pointer, type_name)]
            size = _BYTES_PER_POINTER * len(pointers)
            self._held_pointers.put((pointers, type_name), found, size)
        return found

    def of_type(self, pointers: frozenset[str], type_name: str | None) -> frozenset[str]:
        """`pointers`, and those of the alternatives that apply to a value because it is of this
        type: the only ones of an `anyOf` or `oneOf` that allow it."""
        held = self._held
        if held is None:
            return pointers
        found = self._children.get((pointers, ("type", type_name)))
        if found is None:
            found, result = pointers, frozenset[str]()
            while len(found) > len(result):
                result = found
                alternatives = [
                    held.possible(pointer, key, type_name)
                    for pointer in found
                    for key in ("anyOf", "oneOf")
                ]
                found |= self._expanded({one[0] for one in alternatives if len(one) == 1})
            size = _BYTES_PER_POINTER * (len(pointers) + len(found))
            self._children.put((pointers, ("type", type_name)), found, size)
        return found

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
                yield f"{pointer}/properties/{pointer_part(key)}"
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
                reference = local_pointer(node.get("$ref"))
                if reference is not None:
                    stack.append(reference)
                parts = node.get("allOf", ())
                stack += [f"{pointer}/allOf/{i}" for i in range(len(parts))]
        return frozenset(result)

    def node(self, pointer: str) -> Any:
        """The subschema at a JSON pointer; None if there is none."""
        node = self.value_schema
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
    """Scans a JSON text byte by byte and validates each value as soon as it is complete.

    Args:
        validator: The validator of the schema.
        tokenizer: The tokenizer of the model.
        holds_all: Whether no part of the answer is settled before the answer ends.

    Attributes:
        num_settled: The number of tokens before the outermost open value that is to be validated as
            a whole; of all tokens if there is none. No later token makes them invalid.
        settled_text: The text before that value.
    """

    validator: Validator
    tokenizer: Tokenizer
    holds_all: bool = False
    text: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)  # of each token's first byte
    stack: list[_Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = -1  # offset of an open string or other scalar
        self._quoted = False
        self._escaped = False
        # The offset of the outermost open value that is held, and the number of tokens before it.
        self._held_start = 0 if self.holds_all else -1
        self._num_before_held = 0

    @property
    def num_settled(self) -> int:
        return len(self.offsets) if self._held_start < 0 else self._num_before_held

    @property
    def settled_text(self) -> str:
        end = len(self.text) if self._held_start < 0 else self._held_start
        return self.text[:end].decode(errors="ignore")

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
            is_valid = self.validator.is_valid(parse_json(bytes(self.text)))
        except (ValueError, RecursionError):
            is_valid = False
        return None if is_valid else self.num_settled

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
            if not self._complete(start, self.next_pointers()):
                invalid_start = start
        self.text.append(byte)
        if invalid_start is not None:
            return invalid_start
        if self._quoted:
            return self._in_string(byte)
        if byte in (_OBJECT, _ARRAY):
            key: str | int = "" if byte == _OBJECT else 0
            pointers = self._begin(byte)
            frame = _Frame(len(self.text) - 1, pointers, byte, key, byte == _OBJECT)
            self.stack.append(frame)
        elif byte in b"}]":
            if self.stack:
                frame = self.stack.pop()
                if not self._complete(frame.start, frame.pointers):
                    return frame.start
        elif byte == ord(","):
            if self.stack and self.stack[-1].kind == _ARRAY:
                self.stack[-1].key = int(self.stack[-1].key) + 1
            elif self.stack:
                self.stack[-1].expects_key = True
        elif byte == ord('"'):
            self._start, self._quoted = len(self.text) - 1, True
            if not (self.stack and self.stack[-1].expects_key):
                self._begin(byte)
        elif self._start < 0 and byte not in b": \t\r\n":
            self._start = len(self.text) - 1
            self._begin(byte)
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
                frame.key = _parse_key(bytes(self.text[start:]))
            elif not self._complete(start, self.next_pointers()):
                return start
        return None

    def _begin(self, byte: int) -> frozenset[str]:
        """The pointers of the subschemas that apply to the value whose first byte is the last of
        the text."""
        type_name = value_type(byte)
        pointers = self.validator.of_type(self.next_pointers(), type_name)
        if self._held_start < 0 and self.validator.is_held(pointers, type_name):
            self._held_start, self._num_before_held = len(self.text) - 1, len(self.offsets) - 1
        return pointers

    def next_pointers(self) -> frozenset[str]:
        """The pointers of the subschemas that apply to a value that starts here."""
        if not self.stack:
            return self.validator.root()
        return self.validator.child(self.stack[-1].pointers, self.stack[-1].key)

    def _complete(self, start: int, pointers: frozenset[str]) -> bool:
        """Whether the value that starts at the offset `start` and ends with the text is valid."""
        type_name = value_type(self.text[start])
        pointers = self.validator.of_type(pointers, type_name)
        if self.validator.checked(pointers, type_name):
            try:
                value = parse_json(bytes(self.text[start:]))
            except (ValueError, RecursionError):
                return False
            if not self.validator.is_value_valid(pointers, value, type_name):
                return False
        if start == self._held_start and self.validator.can_release and not self.holds_all:
            self._held_start = -1
        return True


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Numbers beyond the range of floats are the largest float, which the
    validator reads too.

    Raises:
        ValueError: `text` is not JSON.
        RecursionError: It nests too deep.
    """
    return json.loads(text, parse_float=_parse_float, parse_int=_parse_integer)


def _parse_float(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else copysign(sys.float_info.max, number)


def _parse_integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # more digits than Python reads
        return _parse_float(text)


def _parse_key(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""  # of no property: half of a surrogate pair


def _is_unmasked(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    return (
        any(is_unmasked(key, value) for key, value in node.items())
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


def _message(error: BaseException) -> str:
    path = getattr(error, "instance_path", None)
    location = "#/" + "/".join(map(str, path))[:100] if path else "#"
    if path and path[-1] == "type" and getattr(getattr(error, "kind", None), "name", "") == "anyOf":
        given = abbreviated(str(getattr(error, "instance", "")))
        return f"type is {given}, and must be one of {_TYPES}, or a list of them (at {location})"
    if getattr(getattr(error, "kind", None), "format", None) == "regex":
        return (
            f"the pattern {abbreviated(getattr(error, 'instance', ''))} cannot be compiled: it is"
            " not a regular expression of ECMA-262, or too large, or nests too deep"
            f" (at {location})"
        )
    return f"{one_line(getattr(error, 'message', error))} (at {location})"
