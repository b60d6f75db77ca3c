"""A bound on the parts of one lexeme that may be left out.

The mask engine follows a text by derivatives of its lexemes. In `a?b?c?...`, every part may come
next: the derivative lists, for each part, all that may follow it. Its size is the square of the
number of such parts, and it is computed in one step, before the engine looks at the limits on its
work. A part that may be left out is a group, or has an operator that repeats it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter

from anydecode.constraints.lark_tokens import is_terminal, tokens
from anydecode.errors import ConstraintError

#: Maximum number of groups and repetitions in one lexeme. At this number a step takes up to a
#: quarter of a second and 64 MiB.
MAX_PARTS = 1000
#: A group or repetition of a regular expression, outside of character classes. A class without an
#: end, which is an error of the expression, lasts to its end: no text is read twice.
_IN_REGEX = re.compile(r"\\[\s\S]|\[\^?\]?(?:\\[\s\S]|[^\]\\])*\]?|(?P<found>\(\??|[*?{])")


def check_pattern(pattern: str) -> None:
    """Raises `ConstraintError` if too many parts of a regular expression may be left out."""
    _check("a pattern", _num_in_regex(pattern))


def check_grammar(grammar: str) -> None:
    """Raises `ConstraintError` if too many parts of a regular expression or a terminal, with those
    of the terminals in it, may be left out.

    Args:
        grammar: A grammar in the notation of Lark.
    """
    counts: Counter[str] = Counter()
    inner: defaultdict[str, list[str]] = defaultdict(list)
    terminal = ""  # whose definition is read; empty in a rule
    for token in tokens(grammar):
        if token["defined"] is not None:
            terminal = token["defined"] if is_terminal(token["defined"]) else ""
        elif token["regex"] is not None:
            check_pattern(token["regex"])
            counts[terminal] += _num_in_regex(token["regex"])
        elif token["operator"] is not None:
            counts[terminal] += token["operator"] != "&"
        elif is_terminal(token["reference"]):
            inner[terminal].append(token["reference"])
    for rule in (counts, inner):
        rule.pop("", None)
    try:
        order = list(TopologicalSorter(inner).static_order())
    except CycleError:  # which the mask engine reports
        return
    for name in order:
        counts[name] += sum(counts[one] for one in inner[name])
    for name, count in counts.items():
        _check(f"the terminal {name[:60]}", count)


def _num_in_regex(pattern: str) -> int:
    return sum(part["found"] is not None for part in _IN_REGEX.finditer(pattern))


def _check(what: str, count: int) -> None:
    if count > MAX_PARTS:
        raise ConstraintError(
            f"{what} has {_number(count)} groups and repetitions; at most {MAX_PARTS} are allowed:"
            " merge some of them"
        )


def _number(count: int) -> str:
    """`count` in few characters: terminals that double each other have any number of parts."""
    return str(count) if count < 1_000_000 else "more than a million"
