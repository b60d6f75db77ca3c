"""The patterns of a JSON schema: limits on their cost, and matching.

Patterns come from users, so they are never given to Python's `re`, which can take exponential time.
jsonschema-rs takes linear time for regular patterns and limits the steps for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from anydecode.constraints.byte_cache import ByteCache, allocated_bytes, measured_bytes
from anydecode.errors import ConstraintError

#: Maximum length of a pattern, in characters.
MAX_CHARACTERS = 1 << 16
#: Maximum number of steps to match one pattern with look-around or back-references.
_MAX_BACKTRACKS = 100_000
#: Maximum size of one compiled pattern and of all patterns of a schema together, in bytes.
_MAX_COMPILED_BYTES, MAX_TOTAL_BYTES = 10 << 20, 256 << 20
#: Maximum size of the compiled patterns that are cached, in bytes.
MAX_SEARCHER_BYTES = 32 << 20
#: jsonschema-rs rewrites a pattern once per shorthand class. This is the maximum of shorthands
#: times characters, summed over all patterns of a schema; each takes about a microsecond.
_MAX_REWRITTEN = 500_000
_SHORTHAND = re.compile(r"\\[dDwWsS]")
#: Constructs that split a pattern into several programs, each with a size limit of its own.
_SPLITTING = re.compile(r"\(\?|\\[1-9k]")


def patterns(schema: Any) -> Iterator[str]:
    """All strings in `schema` that may be used as patterns."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            if isinstance(node.get("patternProperties"), dict):
                yield from node["patternProperties"]
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def pattern_options(*schemas: Any) -> Any:
    """Returns the limits for the patterns of `schemas` as an option of jsonschema-rs.

    Raises:
        ConstraintError: A pattern is too long, or the patterns together are too expensive.
    """
    all_patterns = {pattern for schema in schemas for pattern in patterns(schema)}
    longest = max(all_patterns, key=len, default="")
    if len(longest) > MAX_CHARACTERS:
        raise ConstraintError(
            f"the pattern {abbreviated(longest)} has {len(longest)} characters; at most"
            f" {MAX_CHARACTERS} are allowed: use an enum instead, or several patterns"
        )
    if sum(len(pattern) * _count(_SHORTHAND, pattern) for pattern in all_patterns) > _MAX_REWRITTEN:
        raise ConstraintError(
            "the patterns of the schema have too many classes such as \\d, \\w and \\s: their"
            f" number times the length of their pattern may be at most {_MAX_REWRITTEN}; write"
            " them as [0-9], or use fewer"
        )
    num_programs = sum(1 + 2 * _count(_SPLITTING, pattern) for pattern in all_patterns)
    return jsonschema_rs.FancyRegexOptions(
        backtrack_limit=_MAX_BACKTRACKS,
        size_limit=min(_MAX_COMPILED_BYTES, MAX_TOTAL_BYTES // max(1, num_programs)),
    )


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches somewhere in `text`. False if matching takes too many steps, and
    for a pattern that is invalid or too large."""
    searcher = _searcher(pattern)
    return searcher is not None and bool(searcher.is_valid(text))


def abbreviated(pattern: str) -> str:
    """The first 60 characters of `pattern`, quoted, for a message."""
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")


_searchers: ByteCache[str, tuple[Any]] = ByteCache(MAX_SEARCHER_BYTES)


def _searcher(pattern: str) -> Any:
    found = _searchers.get(pattern)
    if found is None:
        schema, allocated = {"pattern": pattern}, allocated_bytes()
        try:
            found = (jsonschema_rs.validator_for(schema, pattern_options=pattern_options(schema)),)
        except (ConstraintError, ValueError):
            found = (None,)
        _searchers.put(pattern, found, measured_bytes(allocated, 100 * len(pattern)))
    return found[0]


def _count(expression: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in expression.finditer(text))
