"""What makes an answer right: equality where there is one answer, a property where there are many.

The properties are those ParallelBench scores by (arXiv:2510.04767): a shuffle has the items of its
list in another order; an insertion gives the list back once the word is taken out; and so on.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydecode.evaluation.parallelbench.tasks import Example


def is_same_text(example: Example, text: str) -> bool:
    """The reference, up to white space."""
    return text.split() == example.answer.split()


def is_shuffle(example: Example, text: str) -> bool:
    """The same items, in another order."""
    found = tuple(text.split())
    return Counter(found) == Counter(example.items) and found != example.items


def is_insertion(example: Example, text: str) -> bool:
    """The list again, once the new word is taken out."""
    found = text.split()
    if example.word not in found:
        return False
    found.remove(example.word)
    return tuple(found) == example.items


def is_removal(example: Example, text: str) -> bool:
    """The list less one item, the others in their order."""
    items, found = example.items, tuple(text.split())
    return any(found == items[:i] + items[i + 1 :] for i in range(len(items)))


def is_replacement(example: Example, text: str) -> bool:
    """The list with the new word in the place of one item."""
    items, found = example.items, tuple(text.split())
    return any(found == (*items[:i], example.word, *items[i + 1 :]) for i in range(len(items)))


def is_latin_square(example: Example, text: str) -> bool:
    """Three rows that make a 4 x 4 square with the given one: every symbol once in every line."""
    rows = ["".join(example.items), *text.split()]
    lines = [*rows, *("".join(row[i : i + 1] for row in rows) for i in range(4))]
    symbols = sorted(example.items)
    return len(rows) == 4 and all(sorted(line) == symbols for line in lines)


def is_same_record(example: Example, text: str) -> bool:
    """A JSON object with the same fields and values, in whatever order."""
    try:
        return bool(json.loads(text) == json.loads(example.answer))
    except ValueError:
        return False


def is_same_code(example: Example, text: str) -> bool:
    """A Python line with the same syntax tree."""
    return _tree(text.strip()) == _tree(example.answer.strip())


def _tree(line: str) -> str | None:
    wrapped = "def wrapper():\n" + "\n".join(f"    {part}" for part in line.splitlines() or [""])
    try:
        return ast.dump(ast.parse(wrapped))
    except (SyntaxError, ValueError):
        return None
