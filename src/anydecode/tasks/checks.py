"""Checks of answers: equality for tasks with one answer, a property for tasks with many.

The properties are those of ParallelBench (arXiv:2510.04767): a shuffle has the items of its list in
another order; an insertion gives the original list if the word is removed; and so on.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from typing import Protocol


class Reference(Protocol):
    """What a check reads of an example (`anydecode.tasks.tasks.Example`)."""

    @property
    def answer(self) -> str: ...

    @property
    def items(self) -> tuple[str, ...]: ...

    @property
    def word(self) -> str: ...


def is_same_text(example: Reference, text: str) -> bool:
    """Whether `text` is the reference answer, up to white space."""
    return text.split() == example.answer.split()


def is_shuffle(example: Reference, text: str) -> bool:
    """Whether `text` has the same items in another order."""
    words = tuple(text.split())
    return Counter(words) == Counter(example.items) and words != example.items


def is_insertion(example: Reference, text: str) -> bool:
    """Whether `text` is the list with the new word inserted."""
    words = text.split()
    if example.word not in words:
        return False
    words.remove(example.word)
    return tuple(words) == example.items


def is_removal(example: Reference, text: str) -> bool:
    """Whether `text` is the list without one item, in the same order."""
    items, words = example.items, tuple(text.split())
    return any(words == items[:i] + items[i + 1 :] for i in range(len(items)))


def is_replacement(example: Reference, text: str) -> bool:
    """Whether `text` is the list with one item replaced by the new word."""
    items, words = example.items, tuple(text.split())
    return any(words == (*items[:i], example.word, *items[i + 1 :]) for i in range(len(items)))


def is_latin_square(example: Reference, text: str) -> bool:
    """Whether `text` has three rows that complete a 4 x 4 Latin square: each symbol once per row
    and column."""
    rows = ["".join(example.items), *text.split()]
    lines = [*rows, *("".join(row[i : i + 1] for row in rows) for i in range(4))]
    symbols = sorted(example.items)
    return len(rows) == 4 and all(sorted(line) == symbols for line in lines)


def is_same_record(example: Reference, text: str) -> bool:
    """Whether `text` is a JSON object with the same fields and values, in any order."""
    try:
        return bool(json.loads(text) == json.loads(example.answer))
    except ValueError:
        return False


def is_same_code(example: Reference, text: str) -> bool:
    """Whether `text` is Python code with the same syntax tree."""
    return _tree(text.strip()) == _tree(example.answer.strip())


def _tree(line: str) -> str | None:
    wrapped = "def wrapper():\n" + "\n".join(f"    {part}" for part in line.splitlines() or [""])
    try:
        return ast.dump(ast.parse(wrapped))
    except (SyntaxError, ValueError):
        return None
