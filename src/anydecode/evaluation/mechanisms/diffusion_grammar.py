"""Which canvases a grammar can still complete, against every completion written out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from anydecode.constraints.byte_grammar import byte_grammar
from anydecode.constraints.canvas_grammar import HOLE, CanvasAnswer, CanvasGrammar
from anydecode.constraints.languages import Choice, Grammar
from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.denoising import PROMPT, bidirectional, dense, softmax
from anydecode.models.scripted import EOS, MASK

RECORD = r"""
start: " "? "{" pair (", " pair)* "}"
pair: "\"" /[a-z]+/ "\": " value
value: "\"" /[A-Za-z]*/ "\"" | /0|[1-9][0-9]*/ | "true" | "false"
"""


def balanced(text: str) -> bool:
    """Whether every bracket has its partner."""
    depth = 0
    for sign in text:
        depth += {"(": 1, ")": -1}.get(sign, -99)
        if depth < 0:
            return False
    return depth == 0


# x is empty, or a^n with n or n - 1 times b behind; 6 bytes are tried
_ONE = "(" + "|".join("a" * n + "b" * m for n in range(1, 7) for m in (n, n - 1)) + "|)"
_TWICE = _ONE + _ONE

#: Grammars, and what they say in a line of Python.
LANGUAGES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ('start: "a" start "b" | "ab"', lambda t: t == "a" * (len(t) // 2) + "b" * (len(t) // 2) != ""),
    ('start: s\ns: s s | "(" s ")" | ', balanced),
    (
        'start: "a" start "a" | "b" start "b" | "a"? | "b"',
        lambda t: t == t[::-1] and not {*t} - {*"ab"},
    ),
    ("start: /(a|bb)*b?/", lambda t: re.fullmatch("(a|bb)*b?", t) is not None),
    ('start: x x\nx: "a" y |\ny: x "b" | "b"?', lambda t: re.fullmatch(_TWICE, t) is not None),
)
PIECES = tuple(piece.encode() for piece in ("a", "b", "ab", "ba", "(", ")", "((", ")("))
END = len(PIECES)


def verifier(grammar: str, pieces: tuple[bytes, ...] = PIECES) -> CanvasGrammar:
    """Over these tokens and one that ends the text."""
    known: Any = SimpleNamespace(pieces=[*pieces, b""], size=len(pieces) + 1)
    return CanvasGrammar(byte_grammar(grammar), known, frozenset({len(pieces)}))


def texts(is_text: Callable[[str], bool], length: int) -> set[tuple[int, ...]]:
    """Every canvas of `length` without masks that is a text, by trying all."""
    found = set()
    for said in range(length + 1):
        for tokens in product(range(END), repeat=said):
            if is_text(b"".join(PIECES[token] for token in tokens).decode()):
                found.add((*tokens, *[END] * (length - said)))
    return found


def canvases(length: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Some of length `length`, half of their tokens masked."""
    draw = Random(seed)
    return [
        tuple(draw.choice((HOLE, draw.randrange(END + 1))) for _ in range(length))
        for _ in range(count)
    ]


def fits(canvas: tuple[int, ...], whole: set[tuple[int, ...]]) -> bool:
    """Whether some text has the canvas's tokens where they are."""
    return any(
        all(one in (HOLE, other) for one, other in zip(canvas, text, strict=True)) for text in whole
    )


@mechanism("diffusion-cfg")
def diffusion_cfg() -> Iterator[Check]:
    """Neither a canvas with a completion is rejected nor one without accepted."""
    for grammar, is_text in LANGUAGES:
        rules, wrong, yes, tried = verifier(grammar), 0, 0, 0
        for length in (1, 2, 3):
            whole = texts(is_text, length)
            some = canvases(length, 60, seed=length)
            some += [
                tuple(HOLE if i % 2 else t for i, t in enumerate(one)) for one in sorted(whole)
            ]
            for canvas in some:
                expected = fits(canvas, whole)
                wrong += rules.is_completable(canvas) != expected
                yes, tried = yes + expected, tried + 1
                if expected and HOLE in canvas:
                    wrong += _wrong_tokens(rules, canvas, whole)
        detail = f"{wrong} wrong of {tried} canvases, {yes} with a completion"
        yield Check(
            f"as by trying all completions: {grammar!r}", not wrong and 0 < yes < tried, detail
        )
    options = ("abab", "abba", "bb", "baba", "aaa")
    script = _over(b"ab")
    with bidirectional(script) as llm:
        found = llm.generate(
            [list(PROMPT)],
            decoder="diffusion-cfg:block=0",
            constraint=Choice(options),
            max_tokens=4,
            trace=True,
        )[0]
    filled = [step["filled"] for step in found.trace or []]
    expected_fill = _naive(script, {(*map(ord, one), *[EOS] * (4 - len(one))) for one in options})
    yield Check(
        "writes the surest token that leaves a completion",
        ([*found.tokens], filled) == expected_fill,
        f"{found.text!r}",
    )


def _wrong_tokens(
    rules: CanvasGrammar, canvas: tuple[int, ...], whole: set[tuple[int, ...]]
) -> int:
    """Of the last hole, the tokens judged wrongly, one by one and all together."""
    position = max(i for i, token in enumerate(canvas) if token == HOLE)
    good = [fits((*canvas[:position], t, *canvas[position + 1 :]), whole) for t in range(END + 1)]
    look = CanvasAnswer(rules, canvas)
    wrong = sum(look.accepts(position, token) != is_good for token, is_good in enumerate(good))
    return wrong + int((look.allowed(position) != np.array(good)).sum())


def _over(alphabet: bytes) -> Any:
    """Logits that prefer these bytes and, a little less, an end of text."""
    inner = dense(spread=2.0)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = inner(path).copy()
        row[[*alphabet]] += 9.0
        row[EOS] = row[alphabet[0]] - 1.0
        result: np.ndarray = row
        return result

    return logits


def _naive(script: Any, whole: set[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Position by position as the model is sure; where the likeliest token leaves no completion,
    all such tokens are taken out, and the masks are ranked again."""
    canvas, filled = [*PROMPT, *[MASK] * 4], []
    start = len(PROMPT)
    while MASK in canvas:
        rows = {i: script((*canvas, i)).copy() for i, t in enumerate(canvas) if t == MASK}
        while True:
            sure = {i: softmax(row) for i, row in rows.items()}
            position = max(sure, key=lambda i: (sure[i].max(), -i))
            token = int(sure[position].argmax())
            held = [HOLE if t == MASK else t for t in canvas[start:]]
            fit = [
                fits((*held[: position - start], t, *held[position - start + 1 :]), whole)
                for t in range(len(rows[position]))
            ]
            if fit[token]:
                break
            rows[position][~np.array(fit)] = -np.inf
        canvas[position] = token
        if token == EOS:
            canvas[position:] = [EOS] * len(canvas[position:])
        filled.append([position])
    said = canvas[start:]
    return said[: said.index(EOS) + 1] if EOS in said else said, filled


@measure("diffusion-cfg", "answers that do not parse", samples=64, margin=0.0)
def unparsed(samples: int) -> float:
    """Of records and, by a reader of JSON, in prompts that ask for one and in others."""
    from anydecode.evaluation.parallelbench.tasks import examples

    kinds = (("json", 0.0), ("json", 1.5), ("copy", 0.7), ("chain", 1.5))
    wrong = asked = 0
    with LLM("tiny-diffusion", threads=1) as llm:
        for task, temperature in kinds:
            prompts = [one.prompt for one in examples(task, samples // len(kinds), seed=7)]
            answers = llm.generate(
                prompts,
                decoder="diffusion-cfg",
                constraint=Grammar(RECORD),
                max_tokens=20,
                temperature=temperature,
                seed=3,
            )
            asked += len(answers)
            wrong += sum(not _is_record(answer.text) for answer in answers)
    return wrong / asked


@measure("diffusion-cfg", "records that are right, lost to the constraint", samples=48, margin=0.02)
def lost(samples: int) -> float:
    """Share of questions, against the same order of filling without a constraint."""
    from anydecode.evaluation.parallelbench.tasks import examples

    asked = [*examples("json", samples, seed=7)]
    right = []
    with LLM("tiny-diffusion", threads=1) as llm:
        for constraint in (None, Grammar(RECORD)):
            answers = llm.generate(
                [one.prompt for one in asked],
                decoder="diffusion-cfg",
                constraint=constraint,
                max_tokens=24,
            )
            right.append(sum(e.is_right(a.text) for e, a in zip(asked, answers, strict=True)))
    return (right[0] - right[1]) / samples


def _is_record(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
