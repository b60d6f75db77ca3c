"""The files of a split GGUF model, `NAME-00001-of-0000N.gguf` to `NAME-0000N-of-0000N.gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_number(name: str) -> int | None:
    """The number of a part, from 1, by its file name or path; None for a whole file."""
    match = _PART.fullmatch(name)
    return int(match[2]) if match and 1 <= int(match[2]) <= int(match[3]) else None


def part_names(name: str) -> list[str]:
    """The names of all parts, given that of one; a whole file is its only part."""
    match = _PART.fullmatch(name)
    if match is None or part_number(name) is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def first_parts(names: Iterable[str]) -> list[str]:
    """`names` without the second and later parts of split models."""
    return [name for name in names if part_number(name) in (None, 1)]
