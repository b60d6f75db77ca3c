"""The answer in a text."""

from __future__ import annotations

import pytest

from anydecode.rewards.answers import last_line, last_number


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 3 + 4 = 7.", "7"),
        ("It costs $1,200.50 in all.\n#### 1,200.50", "1200.5"),
        ("-0.0", "0"),
        ("003", "3"),
        ("3.0", "3"),
        ("-12", "-12"),
        ("100", "100"),
        ("none", None),
        ("", None),
        ("9" * 200, "9" * 200),
        ("1" + "0" * 60, "1" + "0" * 60),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_last_line() -> None:
    assert last_line("a\n The Answer \n\n") == "the answer"
    assert last_line(" \n") is None
