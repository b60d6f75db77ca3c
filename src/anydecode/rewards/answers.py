"""Finds the answer in a text, in a form in which equal answers are equal texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from anydecode.errors import InvalidRequestError, one_line

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
#: Digits beyond which a number is compared as it is written.
_MAX_DIGITS = 100

AnswerFinder = Callable[[str], str | None]


def last_number(text: str) -> str | None:
    """The last number, without separators of thousands and without zeros that do not change it."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    written: str = numbers[-1].replace(",", "")
    if len(written) > _MAX_DIGITS:
        return written
    number = Decimal(written)
    return format(number.normalize() if number else Decimal(0), "f")


def last_line(text: str) -> str | None:
    """The last line that is not empty, without surrounding white space, in lower case."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].casefold() if lines else None


ANSWERS: dict[str, AnswerFinder] = {"last-number": last_number, "last-line": last_line}


def build(choice: str | AnswerFinder) -> AnswerFinder:
    """The function that `choice` names, or `choice` itself.

    Raises:
        InvalidRequestError: There is none of this name.
    """
    if not isinstance(choice, str):
        return choice
    if choice not in ANSWERS:
        raise InvalidRequestError(
            f"answer is {one_line(choice, 80)!r}; it may be {' or '.join(ANSWERS)}, or a function"
        )
    return ANSWERS[choice]
