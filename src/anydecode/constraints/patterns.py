"""The patterns of a JSON schema: what compiling them may cost, and whether a text has a match.

A pattern comes from a user, so it is never given to Python's `re`, which can take exponential time.
jsonschema-rs takes linear time for regular patterns and counts its steps for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema_rs

from anydecode.errors import ConstraintError

#: Longest pattern, in characters.
LONGEST = 1 << 16
#: Most steps that matching one pattern with look-around or back-references may take.
_MAX_BACKTRACKS = 100_000
#: Most bytes of one compiled pattern, and of all patterns of a schema together.
_MAX_BYTES, _MAX_BYTES_TOGETHER = 10 << 20, 256 << 20
#: jsonschema-rs rewrites a pattern once per shorthand class: most shorthands times characters, over
#: all patterns of a schema; about a microsecond each.
_MAX_REWRITTEN = 500_000
_SHORTHAND = re.compile(r"\\[dDwWsS]")
#: What parts a pattern into several programs, each of which has the limit of bytes to itself.
_PARTING = re.compile(r"\(\?|\\[1-9k]")


def patterns(schema: Any) -> Iterator[str]:
    """Every text in `schema` that may be read as a pattern."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            if isinstance(node.get("patternProperties"), dict):
                yield from node["patternProperties"]
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def pattern_options(*schemas: Any) -> Any:
    """The limits for the patterns of `schemas`, as an option of jsonschema-rs.

    Raises:
        ConstraintError: a pattern is too long, or the patterns together are too expensive.
    """
    found = {pattern for schema in schemas for pattern in patterns(schema)}
    longest = max(found, key=len, default="")
    if len(longest) > LONGEST:
        raise ConstraintError(
            f"the pattern {shown(longest)} has {len(longest)} characters; at most {LONGEST} are"
            " read: write an enum instead, or several patterns"
        )
    if sum(len(one) * _count(_SHORTHAND, one) for one in found) > _MAX_REWRITTEN:
        raise ConstraintError(
            "the patterns of the schema have too many classes such as \\d, \\w and \\s: their"
            f" number times the characters of their pattern may come to {_MAX_REWRITTEN}; write"
            " them as [0-9], or use fewer"
        )
    programs = sum(1 + 2 * _count(_PARTING, one) for one in found)
    return jsonschema_rs.FancyRegexOptions(
        backtrack_limit=_MAX_BACKTRACKS,
        size_limit=min(_MAX_BYTES, _MAX_BYTES_TOGETHER // max(1, programs)),
    )


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches a part of `text`; false where that took too many steps, and for a
    pattern that is not valid or too large."""
    searcher = _searcher(pattern)
    return searcher is not None and bool(searcher.is_valid(text))


def shown(pattern: str) -> str:
    """The beginning of `pattern`, for a message."""
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")


@lru_cache(64)
def _searcher(pattern: str) -> Any:
    schema = {"pattern": pattern}
    try:
        return jsonschema_rs.validator_for(schema, pattern_options=pattern_options(schema))
    except (ConstraintError, ValueError):
        return None


def _count(wanted: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in wanted.finditer(text))
