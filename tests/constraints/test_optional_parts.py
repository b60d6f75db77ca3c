"""Lexemes of which so many parts may be left out that one step of the mask engine takes seconds."""

from __future__ import annotations

import pytest

from anydecode import JsonSchema
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.languages import Grammar, Regex
from anydecode.constraints.optional_parts import MAX_PARTS
from anydecode.constraints.structural_tag import StructuralTag
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()


def doubled(levels: int) -> str:
    """Terminals of which each is twice the one before."""
    rules = "".join(f"\nA{level}: A{level - 1} A{level - 1}" for level in range(1, levels + 1))
    return f"start: A{levels}\nA0: /a?/{rules}"


def start(constraint: Constraint) -> None:
    constraint.start(TOKENIZER, TOKENIZER.vocab_size)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("a*" * (MAX_PARTS + 1)),
        Regex("(a|)" * (MAX_PARTS + 1)),
        Regex("x" + "a{0,9}" * (MAX_PARTS + 1)),
        Regex("(?i)" + "[ab]?" * MAX_PARTS),
        Grammar("start: /" + "a?" * (MAX_PARTS + 1) + "/"),
        Grammar("start: A\nA: " + '"a"? ' * (MAX_PARTS + 1)),
        Grammar("start: A\nA: " + '["a"] ' * (MAX_PARTS + 1)),
        Grammar("start: A\nA: " + "B " * (MAX_PARTS + 1) + '\nB: "a"?'),
        Grammar(doubled(10)),
        Grammar(doubled(300)),
        Grammar('start: %json {"type": "string", "pattern": "^' + "a?" * (MAX_PARTS + 1) + '$"}'),
        StructuralTag({"format": {"type": "regex", "pattern": "a?" * (MAX_PARTS + 1)}}),
    ],
)
def test_too_many_parts_that_may_be_left_out_are_refused(constraint: Constraint) -> None:
    with pytest.raises(ConstraintError, match=f"groups and repetitions; at most {MAX_PARTS}"):
        start(constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("a*" * MAX_PARTS),
        Regex(r"\*" * (MAX_PARTS + 1)),
        Regex("[(*?{]" * (MAX_PARTS + 1)),
        Regex("[]?]" * (MAX_PARTS + 1)),
        Regex("|".join(f"word{number}" for number in range(4000))),
        Grammar("start: A\nA: " + '"?" ' * (MAX_PARTS + 1)),
        Grammar("start: A // " + "?" * (MAX_PARTS + 1) + '\nA: "a"'),
        Grammar("start: " + '"a" ("b" | "c") ' * (MAX_PARTS // 2 + 1)),
        Grammar(doubled(8)),
        JsonSchema({"properties": {f"a{number}": {"pattern": "^a*$"} for number in range(1001)}}),
        StructuralTag(
            {"format": {"type": "any_text", "excludes": [f"a{number}" for number in range(200)]}}
        ),
    ],
)
def test_many_parts_of_which_few_may_be_left_out_are_not(constraint: Constraint) -> None:
    start(constraint)


def test_classes_without_an_end_are_read_once() -> None:
    """In quadratic time this would take hours."""
    with pytest.raises(ConstraintError, match="not valid"):
        start(Regex("a[^b" * 100_000))


def test_terminals_in_a_circle_are_an_error_of_the_grammar() -> None:
    with pytest.raises(ConstraintError, match="circular"):
        start(Grammar("start: A\nA: B\nB: A"))


@pytest.mark.parametrize(
    ("count", "field"), [(800, "masked"), (MAX_PARTS, "checked"), (MAX_PARTS + 1, "checked")]
)
def test_a_pattern_of_a_schema_that_is_not_masked_is_validated(count: int, field: str) -> None:
    """Also at the second time, when the lexer of the first one has grown to its limits."""
    for _ in range(2):
        schema = JsonSchema({"type": "string", "pattern": "^" + "a?" * count + "$"})
        start(schema)
        assert any(entry.startswith("pattern") for entry in getattr(schema.report(), field))
