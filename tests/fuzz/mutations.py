"""Random changes of inputs: of bytes, of JSON values, and of the JSON header of safetensors."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

#: A change of the case that is its second argument.
Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]

_INTEGERS = (0, 1, 2, 7, 64, 127, 255, 256, 65535, 65536, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1,
             1 << 40, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *_INTEGERS, -1, -(2**63), 10**400, 0.5, 1e300, -1e300, float("nan"), float("inf"), True, False,
    None, "", "a", "64", "a\nb", "\x00", "\ud800", "x" * 70_000, [], [[]], [None], {}, {"a": 1},
    list(range(300)), "[" * 300, "..", "/", "{{ 1 }}",
)  # fmt: skip
#: Most changes of one case, and its largest size.
_MAX_CHANGES = 4
MAX_BYTES = 1 << 20


def mutate_bytes(random: Random, case: bytes, tokens: Sequence[bytes]) -> bytes:
    """Insert, delete, repeat or overwrite parts; cut the end. `tokens` are parts to insert."""
    changed = bytearray(case)
    for _ in range(random.randint(1, _MAX_CHANGES)):
        # Headers come first: half of the changes are within the first kilobytes.
        end = len(changed) if random.random() < 0.5 else min(len(changed), 4096)
        at, length = random.randint(0, end), min(random.choice((1, 1, 2, 4, 8, 30)), len(changed))
        part = bytes(changed[at : at + length])
        kind = random.randrange(7)
        if kind == 0:
            changed[at : at + 1] = bytes([random.randrange(256)])
        elif kind == 1:
            changed[at : at + length] = b""
        elif kind == 2:
            changed[at:at] = part * random.choice((1, 2, 50, 2000))
        elif kind == 3:
            number = random.choice(_INTEGERS).to_bytes(8, "little")
            changed[at : at + random.choice((4, 8))] = number[: random.choice((4, 8))]
        elif kind == 4 and tokens:
            changed[at:at] = random.choice(tokens)
        elif kind == 5 and tokens:
            changed[at : at + length] = random.choice(tokens) * random.choice((1, 1, 1, 300))
        elif random.random() < 0.2:
            del changed[at:]
    return bytes(changed[:MAX_BYTES])


def mutate_json(random: Random, case: bytes, tokens: Sequence[bytes]) -> bytes:
    """Change values, keys and nesting; the bytes instead where `case` is no JSON, and sometimes."""
    try:
        tree = json.loads(case)
    except (ValueError, RecursionError):
        return mutate_bytes(random, case, tokens)
    if random.random() < 0.1:
        return mutate_bytes(random, case, tokens)
    try:
        return _dumped(_changed(random, tree, tokens))
    except RecursionError:  # nested too deep to be copied
        return mutate_bytes(random, case, tokens)


def mutate_safetensors(random: Random, case: bytes, tokens: Sequence[bytes]) -> bytes:
    """Change the JSON header with a right length, or any bytes."""
    if len(case) < 8 or random.random() < 0.3:
        return mutate_bytes(random, case, tokens)
    end = 8 + struct.unpack("<Q", case[:8])[0]
    header = mutate_json(random, case[8:end], tokens)
    return struct.pack("<Q", len(header)) + header + case[end:]


def named(mutators: dict[str, Mutator]) -> Mutator:
    """Mutates cases that begin with a line: the mutator is that of the first key in this line."""

    def mutate(random: Random, case: bytes, tokens: Sequence[bytes]) -> bytes:
        name, _, content = case.partition(b"\n")
        mutator = next(m for key, m in mutators.items() if key.encode() in name)
        return name + b"\n" + mutator(random, content, tokens)

    return mutate


def _changed(random: Random, tree: Any, tokens: Sequence[bytes]) -> Any:
    root = {"": copy.deepcopy(tree)}
    for _ in range(random.randint(1, _MAX_CHANGES)):
        nodes = _nodes(root)
        node, key = random.choice(nodes)
        if key not in (node if isinstance(node, dict) else range(len(node))):
            continue  # removed by an earlier change
        kind = random.randrange(7)
        if kind == 0 and key != "":
            del node[key]
        elif kind == 1:
            node[key] = _token(random, tokens)
        elif kind == 2:
            other, other_key = random.choice(nodes)
            node[key] = copy.deepcopy(other[other_key])
        elif kind == 3:
            depth = random.choice((1, 3, 60, 300))
            value, wrap = node[key], random.random() < 0.5
            for _ in range(depth):
                value = [value] if wrap else {str(key): value}
            node[key] = value
        elif kind == 4 and isinstance(node[key], list):
            node[key] = node[key] * random.choice((2, 20, 100))
        elif kind == 4 and isinstance(node[key], dict):
            node[key][str(_token(random, tokens))] = copy.deepcopy(random.choice(_VALUES))
        elif kind == 5 and isinstance(node, dict) and key != "":
            node[str(_token(random, tokens))] = node.pop(key)
        else:
            node[key] = copy.deepcopy(random.choice(_VALUES))
    return root[""]


def _token(random: Random, tokens: Sequence[bytes]) -> Any:
    text = random.choice(tokens).decode(errors="surrogateescape") if tokens else "a"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """All pairs of a container and a key."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        for key, value in items[:200]:
            found.append((node, key))
            if isinstance(value, (dict, list)):
                stack.append(value)
    return found


def _dumped(tree: Any) -> bytes:
    parts, size = [], 0
    try:
        for part in json.JSONEncoder().iterencode(tree):
            parts.append(part)
            size += len(part)
            if size >= MAX_BYTES:  # what a tree holds in many places has no end in text
                break
    except (RecursionError, ValueError):
        return b"[" * 2000
    return "".join(parts).encode()[:MAX_BYTES]
