"""The limits of chat templates: what stays below them renders."""

from __future__ import annotations

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.models.chat import MAX_CHARACTERS, render


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'ab' * 3 }}", "ababab"),
        ("{{ (3 * [1]) | length }}", "3"),
        ("{{ 3 * 4 }}", "12"),
        ("{{ 2 ** 10 }}", "1024"),
        ("{{ 1024 ** 2 }}", str(1024**2)),
        (f"{{{{ ('a' * {MAX_CHARACTERS}) | length }}}}", str(MAX_CHARACTERS)),
    ],
)
def test_expressions_below_the_limits_render(template: str, text: str) -> None:
    assert render(template, []) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (f"{{{{ ('a' * {MAX_CHARACTERS + 1}) | length }}}}", "too long"),
        (f"{{{{ ({MAX_CHARACTERS + 1} * [1]) | length }}}}", "too long"),
        ("{{ 1025 ** 2 }}", "too large a power"),
        ("{{ 2 ** 1025 }}", "too large a power"),
        ("{{ 2 ** -1025 }}", "too large a power"),
    ],
)
def test_expressions_beyond_the_limits_are_refused(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        render(template, [])
