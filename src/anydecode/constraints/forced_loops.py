"""Grammars whose texts may have forced parts without an end.

The mask engine follows forced text as long as a single byte may come next, without a limit. Its
lexer takes the longest match: in `start: A A` with `A: /a+/` the first A takes every "a", so the
only next byte is another "a", for ever. Such a loop lies within one match of a terminal, in a
repetition without an upper bound whose operand always begins with the same byte.
"""

from __future__ import annotations

import re

from anydecode.constraints.grammar.byte_regex import Expression, read_regex
from anydecode.constraints.lark_tokens import is_terminal, tokens
from anydecode.errors import ConstraintError

#: Larger regular expressions are not looked into.
_MAX_CHARACTERS, _MAX_PARTS = 10_000, 20_000
#: A repetition of a terminal without an upper bound, or an intersection.
_OPEN = re.compile(r"[*+&~]|\{\s*\d*\s*,\s*\}")
#: A character class within another one, which `read_regex` reads as a character.
_INNER_CLASS = re.compile(r"\\.|(?P<found>\[\^?\]?(?:\\.|[^\]\\\[])*\[)")
#: Flags of groups. They change no repetition's first bytes from several to one.
_FLAGS = re.compile(r"^\(\?[isu]+\)|(?<=\(\?)[isu]+(?=:)")
_Match = tuple[int, bool]


def may_force_endlessly(grammar: str) -> bool:
    """Whether forced text may have no end. True in case of doubt.

    Args:
        grammar: A grammar in the notation of Lark.
    """
    in_terminal = False
    for token in tokens(grammar):
        if token["defined"] is not None:
            in_terminal = is_terminal(token["defined"])
        elif token["operator"] is not None:
            if in_terminal and _OPEN.fullmatch(token["operator"]):
                return True
        elif token["regex"] is not None and not _branches(token["regex"], token["flags"] or ""):
            return True
    return False


def _branches(pattern: str, flags: str) -> bool:
    """Whether every repetition without an upper bound may go on with different bytes."""
    if not re.search(r"[*+]|\{\d*,\s*\}", pattern):
        return True
    if len(pattern) > _MAX_CHARACTERS or any(
        one["found"] for one in _INNER_CLASS.finditer(pattern)
    ):
        return False
    try:
        return _read(read_regex(_FLAGS.sub("", pattern), flags, _MAX_PARTS)) is not None
    except ConstraintError:
        return False


def _read(part: Expression) -> _Match | None:
    """The bytes with which the texts of an expression may begin (bit b: byte b), and whether it has
    the empty text; None if a repetition in it always begins with the same byte."""
    kind, parts = part
    if kind == "set":
        return parts, False
    found = [_read(one) for one in ((parts,) if kind == "star" else parts)]
    matches = [one for one in found if one is not None]
    if len(matches) < len(found):
        return None
    first, is_empty = 0, kind != "alt"
    for bytes_, has_empty in matches:
        if kind == "alt" or is_empty:
            first |= bytes_
            is_empty = has_empty if kind == "seq" else is_empty or has_empty
    if kind == "star" and first.bit_count() < 2:
        return None
    return first, is_empty or kind in ("star", "first")
