"""Errors of invalid patterns and grammars: what is wrong, and where, in one line."""

from __future__ import annotations

import pytest

pytest.importorskip("llguidance")

from anydecode.benchmarks.constrained_bench import walk  # noqa: E402
from anydecode.constraints.languages import Grammar, Regex  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402

LONG = "x" * 500


def error_of(constraint: Regex | Grammar) -> str:
    tokenizer = ByteTokenizer()
    with pytest.raises(ConstraintError) as failure:
        constraint.start(tokenizer, tokenizer.vocab_size)
    return str(failure.value)


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("ab(", "'ab(' is not valid at character 3: unclosed group"),
        ("(?=a)b", "'(?=a)b' is not valid at character 1: look-around, including look-ahead"),
        (r"a\1", r"'a\1' is not valid at character 2: backreferences are not supported"),
        (f"({LONG}", f"'({LONG[:39]}...' is not valid at character 1: unclosed group"),
        (f"{LONG}(", f"'...{LONG[:40]}(' is not valid at character 501: unclosed group"),
        ("too big(", "'too big(' is not valid at character 8: unclosed group"),
    ],
)
def test_the_error_of_a_pattern_says_where_and_why(pattern: str, expected: str) -> None:
    assert error_of(Regex(pattern)).startswith(f"the regular expression {expected}")
    error = error_of(Grammar(f'start: "x" part\npart: /{pattern}/'))
    assert error.startswith(f"the regular expression {expected}")


def test_the_error_of_a_grammar_has_its_line_and_column() -> None:
    start = "the grammar is not valid at line"
    unknown, open_text = Grammar('start: a b\na: "x"'), Grammar('start: a\na: "x')
    assert error_of(unknown) == f'{start} 1, column 8: unknown name: "b"'
    assert error_of(open_text) == f"{start} 2, column 6: lexer error"
    assert error_of(Grammar('other: "a"')) == "no start rule found"


def test_the_error_of_a_panic_has_no_backtrace() -> None:
    lazy = Grammar('start: a b\na[lazy]: /(.*x)*/\nb[stop="y"]: /.*/')
    assert error_of(lazy) == (
        "llguidance cannot use this constraint: assertion failed: !state.has_lowest_match(); write"
        " it differently"
    )


def test_too_many_optional_parts_are_named_as_the_cause() -> None:
    parts = " ".join(['("<" /[0-9]/ ">")?'] * 2500)
    with pytest.raises(ConstraintError) as failure:
        walk(Grammar(f"start: {parts}"), ByteTokenizer(), "<1>")
    error = str(failure.value)
    assert error.startswith("the constraint allows too many alternatives at this place of the text")
