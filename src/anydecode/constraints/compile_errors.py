"""Errors of llguidance in compiling or using a grammar, in one line: what is wrong, where, why."""

from __future__ import annotations

import re

from anydecode.errors import one_line

#: The error of a regular expression: the pattern, a mark below the place, and the reason.
_PATTERN = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.*)")
#: A line of the grammar that is quoted below an error, and a mark below one.
_QUOTED = re.compile(r"^(?: *\d+ \| .*| +\^+)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
#: Too many alternatives for one mask.
_TOO_MANY_ITEMS = re.compile(r"Current row has \d+ items|Too many items \(limit")
#: Longest part of a pattern before and behind the place of an error, in characters.
_CONTEXT = 40


def compile_error(error: object) -> str:
    """The message for an error of llguidance in compiling a grammar, or in using it."""
    text, _, trace = str(error).partition("\n<backtrace>")
    if trace:
        reason = text.removeprefix("panic: ")
        return one_line(f"llguidance cannot use this constraint: {reason}; write it differently")
    if found := _PATTERN.search(text):
        pattern, indent, reason = found.groups()
        return _pattern_error(pattern, len(indent), reason)
    if "NoExtensionBias" in text:  # the error for an empty grammar
        return "the constraint cannot be met: it allows no text"
    if "too many expressions" in text or "too big" in text:
        return (
            "the constraint is too large to be compiled: make the repetitions in its patterns"
            " smaller or its alternatives fewer"
        )
    if _TOO_MANY_ITEMS.search(text):
        return (
            "the constraint allows too many alternatives at this place of the text for a mask to be"
            " computed: make its alternatives or optional parts fewer"
        )
    place = r"the grammar is not valid at line \1, column \2: "
    return one_line(_PLACE.sub(place, _QUOTED.sub("", text)))


def _pattern_error(pattern: str, place: int, reason: str) -> str:
    start, end = max(0, place - _CONTEXT), place + _CONTEXT
    quoted = "..." * (start > 0) + pattern[start:end] + "..." * (end < len(pattern))
    message = f"the regular expression '{quoted}' is not valid at character {place + 1}: {reason}"
    return one_line(message)
