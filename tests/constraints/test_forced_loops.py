"""Grammars whose forced text has no end: they are found, and their masks take finite time."""

from __future__ import annotations

import pytest

from anydecode import Grammar
from anydecode.constraints.forced_loops import may_force_endlessly
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()
#: With what the first mask allows.
ENDLESS = {
    "start: A A\nA: /a+/": "a",
    "start: A~2..5\nA: /a/+": "a",
    "start: A~2..5\nA: /a/{2,}": "a",
    'start: A A\nA: B{ 2 , }\nB: "a"': "a",
    'start: X SP SP\nX: "x"\nSP: / +/': "x",
    'start: /(ab)+/ "a"': "a",
    'start: /[a]{2,}/ "a"': "a",
    'start: /(a?)*/ A\nA: "a"*': "a",
    'start: A A # "\nA: /a/+': "a",
    'start: A A\nA: /"a\na"/+': '"',
    "start: A A\nA: /\\n/+": "\n",
}


@pytest.mark.parametrize("text", ENDLESS)
def test_masks_of_endless_grammars_take_finite_time(text: str) -> None:
    """Without the option that they get, the mask engine does not return."""
    grammar = Grammar(text)
    assert may_force_endlessly(text)
    assert "no_forcing" in grammar.guidance()
    state = grammar.start(TOKENIZER, 259)
    assert chr(int(state.mask().nonzero()[0][0])) == ENDLESS[text]
    for _ in range(20):
        token = int(state.mask().nonzero()[0][0])
        if token >= 256:
            break
        state.advance(token)


@pytest.mark.parametrize(
    "text",
    [
        "start: A /x/\nA\n : /b/+",
        "start: A\nA.2: B*\nB: /b/",
        "start: A\nA-1 . 2 : B*\nB: /b/",
        'start: A\nA [stop=/]"[/] : B*\nB: /b/',
        'start: A | <"a>\nA: B*\nB: /b/',
        "start: A\nA: /[ab]+/ & /[bc]+/",
        "start: A\nA: ~/[ab]+/",
        "start: /([[a]])+/",
        "start: /[a-z&&[a]]+/",
        r"start: /[^\x00-\x60\x62-\U0010ffff]+/",
        r"start: /\p{L}+/",
        "start: /(a[bc])*/",
        "start: /(x|ya*)/",
        "start: /" + "[ab]*" * 5000 + "/",
    ],
)
def test_doubtful_grammars_are_found(text: str) -> None:
    assert may_force_endlessly(text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"+ b*\nb: A~2..3\nA: "x"~5',
        'start: "a"{2,} A A\nA: "x"{2,5}',
        r'start: /"(\\.|[^"\\])*"/ "a"',
        "start: WS B\nWS: /[ \\t\\n]+/\nB: /-?[0-9]+([.][0-9]+)?/",
        'start: "a+" // A: b+',
        'start: x "A: b+" "//"\nx: "\\""',
        r"start: /(?s:.*)/ /.+/s /\d+\w*[^x]*/ /(?i)[a-z]+/",
        r"start: /\[[0-9]+\]/ /a{3}b{2,5}c?/ /(a?b)*/",
        'start[stop="]+"]: /[ab]+/',
        'start: %json {"type": "string", "pattern": "^a+$"}',
    ],
)
def test_ordinary_grammars_keep_forced_text(text: str) -> None:
    assert not may_force_endlessly(text)
    assert "no_forcing" not in Grammar(text).guidance()
