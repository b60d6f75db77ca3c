"""The limits of chat templates: what stays below them renders."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.models.chat import MAX_CHARACTERS, render, select_template


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


@pytest.mark.parametrize(
    ("names", "variables", "chosen"),
    [
        (("default", "tool_use"), {}, "default"),
        (("default", "tool_use"), {"tools": None}, "default"),
        (("default", "tool_use"), {"tools": []}, "default"),
        (("default", "tool_use"), {"tools": [{"type": "function"}]}, "tool_use"),
        (("default", "rag"), {"tools": [{"type": "function"}]}, "default"),
    ],
)
def test_the_template_for_tools_is_chosen_if_there_are_tools(
    names: tuple[str, ...], variables: dict[str, Any], chosen: str
) -> None:
    assert select_template({name: name for name in names}, variables) == chosen


def test_a_template_without_a_known_name_is_not_chosen() -> None:
    with pytest.raises(InvalidRequestError, match="its templates are rag, tool_use"):
        select_template({"tool_use": "", "rag": ""}, {"tools": []})
