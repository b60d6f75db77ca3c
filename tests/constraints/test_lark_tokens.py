"""The tokens of grammars are those of the mask engine's lexer."""

from __future__ import annotations

import pytest

from anydecode.constraints.lark_tokens import is_terminal, tokens


def found(grammar: str) -> list[tuple[str, str]]:
    names = ("regex", "defined", "reference", "operator")
    return [(name, one[name]) for one in tokens(grammar) for name in names if one[name] is not None]


def test_definitions_references_and_operators() -> None:
    grammar = '?start[stop="]:", lazy].-1 : a-b{2,} (C_1 | "c"i?)+ ~ 3..5\n_C-2: /x\\/y/i*'
    assert found(grammar) == [
        ("defined", "?start"),
        ("reference", "a-b"),
        ("operator", "{2,}"),
        ("operator", "("),
        ("reference", "C_1"),
        ("operator", "?"),
        ("operator", "+"),
        ("operator", "~ 3"),
        ("defined", "_C-2"),
        ("regex", "x\\/y"),
        ("operator", "*"),
    ]


@pytest.mark.parametrize(
    "before",
    ['# "', "# /", '// "', '"\\""', '"/"', '"#"', '<"a>', '/a\n"/', "/#/", r"/\//", "@a"],
)
def test_nothing_hides_what_follows(before: str) -> None:
    assert found(f"start: {before}\nA: b*")[-3:] == [
        ("defined", "A"),
        ("reference", "b"),
        ("operator", "*"),
    ]


@pytest.mark.parametrize(
    "part", ["a[", 'a["', "a[/", "a ", "a.", "{ ", "{1", "~ ", "<a", '"\\', "/", "/\\\n", "a[/b\n["]
)
def test_long_texts_are_read_in_linear_time(part: str) -> None:
    """In quadratic time each would take minutes."""
    for _ in tokens(part * 200_000):
        pass


def test_names_of_terminals() -> None:
    assert all(is_terminal(name) for name in ("A", "_A-1"))
    assert not any(is_terminal(name) for name in ("a", "_a", "?a", "!_a"))
