"""Oracle test of diffusion-cfg (Constrained Decoding of Diffusion LLMs with Context-Free Grammars,
arXiv:2508.10111): which canvases can be completed, by an enumeration of all completions; where
terminals end, by a lexer that tries all texts of each of them; and which JSON values a schema
allows, by a validator of schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations, product
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import PROMPT, bidirectional, dense, softmax
from anydecode.constraints.grammar.byte_grammar import byte_grammar
from anydecode.constraints.grammar.canvas_grammar import MASK_POSITION, CanvasGrammar
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.json.schema_grammar import canvas_grammar_of
from anydecode.constraints.languages import Choice, Grammar
from anydecode.models.scripted import EOS, MASK, ByteTokenizer
from anydecode.tasks.tasks import examples

RECORD = r"""
start: " "? "{" pair (", " pair)* "}"
pair: "\"" /[a-z]+/ "\": " value
value: "\"" /[A-Za-z]*/ "\"" | /0|[1-9][0-9]*/ | "true" | "false"
"""


def balanced(text: str) -> bool:
    """Whether the brackets are balanced."""
    depth = 0
    for sign in text:
        depth += {"(": 1, ")": -1}.get(sign, -99)
        if depth < 0:
            return False
    return depth == 0


# x is empty or a^n followed by n or n - 1 times b; texts of up to 6 bytes are tried
_ONE = "(" + "|".join("a" * n + "b" * m for n in range(1, 7) for m in (n, n - 1)) + "|)"


_TWICE = _ONE + _ONE


def lexed(
    rules: dict[str, tuple[str, ...]], terminals: dict[str, str], ignored: str = "(?!)"
) -> Callable[[str], bool]:
    """The predicate of a grammar whose terminals are the longest matches among those that may come
    next, and no ignored text. It enumerates the sequences of terminals, and the texts of each.

    Args:
        rules: The alternatives of each rule, as names with spaces between them; `start` is the
            whole text.
        terminals: Regular expressions over the letters of `PIECES`, by name.
        ignored: The regular expression of ignored text.
    """
    alphabet = sorted({chr(byte) for piece in PIECES for byte in piece})
    every = ["".join(text) for size in range(1, 8) for text in product(alphabet, repeat=size)]
    kinds = {**terminals, "ignored": ignored}
    matches = {
        name: {text for text in every if re.fullmatch(kind, text)} for name, kind in kinds.items()
    }
    begins = {
        name: {text[:size] for text in found for size in range(1, len(text) + 1)}
        for name, found in matches.items()
    }
    sentences: dict[str, set[tuple[str, ...]]] = {name: set() for name in rules}
    sentences |= {name: {(name,)} for name in terminals}
    before = -1
    while before < (before := sum(map(len, sentences.values()))):
        for name, alternatives in rules.items():
            for alternative in alternatives:
                found: set[tuple[str, ...]] = {()}
                for part in alternative.split():
                    found = {a + b for a in found for b in sentences[part] if len(a + b) <= 8}
                sentences[name] |= found
    prefixes = {one[:size] for one in sentences["start"] for size in range(len(one) + 1)}

    @cache
    def is_text(text: str) -> bool:
        read: set[tuple[str, ...]] = {()}
        while text:
            allowed = [
                name
                for name in kinds
                if name == "ignored" or any((*one, name) in prefixes for one in read)
            ]
            size = 0
            while size < len(text) and any(text[: size + 1] in begins[name] for name in allowed):
                size += 1
            if text[:size] not in matches["ignored"]:
                matched = [name for name in allowed if text[:size] in matches[name]]
                read = {(*one, name) for one in read for name in matched} & prefixes
            if not read:
                return False
            text = text[size:]
        return bool(read & sentences["start"])

    return is_text


#: Grammars with terminals that overlap: the grammar, its rules, its terminals and its ignored text.
LEXED: tuple[tuple[str, dict[str, tuple[str, ...]], dict[str, str], str], ...] = (
    ('start: X Y\nX: /a+/\nY: "ab" | ")"', {"start": ("X Y",)}, {"X": "a+", "Y": r"ab|\)"}, "(?!)"),
    ('start: "ab" N | N ")" N\nN: /[ab]+/\n%ignore /[(]+/',
     {"start": ("IF N", "N IS N")}, {"IF": "ab", "N": "[ab]+", "IS": r"\)"}, r"\(+"),
    ('start: e\ne: e "b" e | e "bb" | "b" e | "a" | ")" e ")"\n%ignore "("',
     {"start": ("e",), "e": ("e ONE e", "e TWO", "ONE e", "A", "P e P")},
     {"ONE": "b", "TWO": "bb", "A": "a", "P": r"\)"}, r"\("),
    ('start: (X | Y | Z)+\nX: "a"\nY: "aba"\nZ: "b"',
     {"start": ("one", "one start"), "one": ("X", "Y", "Z")},
     {"X": "a", "Y": "aba", "Z": "b"}, "(?!)"),
    ('start: K K | N ")" K | N "(" start\nK: "ab"\nN: /[ab]{1,2}/',
     {"start": ("K K", "N IS K", "N OPEN start")},
     {"K": "ab", "N": "[ab]{1,2}", "IS": r"\)", "OPEN": r"\("}, "(?!)"),
    ('start: X Y X\nX: "a"\nY: /b+/ | ")"\n%ignore /b\\)?/', {"start": ("X Y X",)},
     {"X": "a", "Y": r"b+|\)"}, r"b\)?"),
    ('start: "(" N? ")" x | "a"\nx: N | N start\nN: /a+b?/',
     {"start": ("OPEN N CLOSE x", "OPEN CLOSE x", "A"), "x": ("N", "N start")},
     {"OPEN": r"\(", "CLOSE": r"\)", "N": "a+b?", "A": "a"}, "(?!)"),
)  # fmt: skip


#: Grammars, each with a Python predicate of its language.
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
    """A grammar over these tokens and one end-of-text token."""
    tokens: Any = SimpleNamespace(token_bytes=[*pieces, b""], size=len(pieces) + 1)
    return CanvasGrammar(byte_grammar(grammar), tokens, frozenset({len(pieces)}))


def texts(is_text: Callable[[str], bool], length: int) -> set[tuple[int, ...]]:
    """Every canvas of `length` without masks that is a text of the language, by enumeration."""
    texts = set()
    for size in range(length + 1):
        for tokens in product(range(END), repeat=size):
            if is_text(b"".join(PIECES[token] for token in tokens).decode()):
                texts.add((*tokens, *[END] * (length - size)))
    return texts


def canvases(length: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Random canvases of `length`; each position is masked with probability 1/2."""
    draw = Random(seed)
    return [
        tuple(draw.choice((MASK_POSITION, draw.randrange(END + 1))) for _ in range(length))
        for _ in range(count)
    ]


def fits(canvas: tuple[int, ...], complete: set[tuple[int, ...]]) -> bool:
    """Whether a text of `whole` agrees with the unmasked tokens of the canvas."""
    return any(
        all(one in (MASK_POSITION, other) for one, other in zip(canvas, text, strict=True))
        for text in complete
    )


#: Schemas whose values are tested, of several kinds each.
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
     "required": ["b"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}, "ab": {"type": "boolean"}},
     "additionalProperties": {"type": "integer", "minimum": 0}},
    {"type": "array", "items": {"type": "integer", "minimum": -2, "maximum": 11},
     "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "number"}, {"enum": ["a", None]}], "minItems": 1},
    {"type": "array", "prefixItems": [{}, {"type": "integer"}], "items": False},
    {"type": "number", "exclusiveMinimum": -2, "maximum": 3},
    {"type": ["string", "null"], "minLength": 1, "maxLength": 2},
    {"type": "string", "pattern": "^(a|b)"},
    {"anyOf": [{"const": {"a": [1]}}, {"$ref": "#/$defs/list"}],
     "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}},
    {"type": "object", "properties": {"b": {}}, "required": ["a"], "additionalProperties": True},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"enum": [None, 1]}},
     "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 2},
    {"type": ["number", "string"], "multipleOf": 0.75, "pattern": "b", "maxLength": 2},
)  # fmt: skip


def values() -> Iterator[Any]:
    """JSON values: scalars, and lists and objects of them."""
    numbers = [*range(-12, 13), 99, 100, 1.5, -1.5, -2.5, 3.5, 2.25]
    scalars = [None, True, False, *numbers, "", "a", "b", "ab", "ba", "c", "aé", '"', "a\n", "abc"]
    yield from scalars
    few: list[Any] = [None, True, 1, -2, 12, 2.5, "a", "", [], [[]], {}, {"a": [1]}]
    for length in range(4):
        yield from (list(one) for one in product(few, repeat=length))
    for length in range(4):
        for names in permutations(("a", "ab", "b", "é"), length):
            for members in product(few[:7], repeat=length):
                yield dict(zip(names, members, strict=True))


def _wrong_values(schema: Any) -> tuple[int, int, int]:
    """The number of values that the grammar of a schema judges wrongly, of valid values, and of all
    values. An object whose properties are in another order than the schema's need not be
    allowed."""
    tokenizer = ByteTokenizer()
    state: Any = JsonSchema(schema, extra_properties=True).start(tokenizer, tokenizer.vocab_size)
    tokens: Any = SimpleNamespace(token_bytes=[bytes([byte]) for byte in range(256)], size=256)
    grammar = CanvasGrammar(canvas_grammar_of(state.origin), tokens, frozenset())
    validator = jsonschema_rs.validator_for(schema)
    names = [*schema.get("properties", ()), *schema.get("required", ())]
    wrong = num_valid = total = 0
    for value in values():
        is_valid = validator.is_valid(value)
        is_allowed = grammar.is_completable(
            [*json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()]
        )
        order = (
            [names.index(name) if name in names else 99 for name in value]
            if (isinstance(value, dict))
            else []
        )
        wrong += is_allowed != is_valid and (is_allowed or order == sorted(order))
        num_valid, total = num_valid + is_valid, total + 1
    for twice in ('{"a":1,"a":"x","b":"x"}', '{"a":null,"a":3}', '{"b":"x","b":1}'):
        wrong += grammar.is_completable([*twice.encode()])
    return wrong, num_valid, total


@oracle_test("diffusion-cfg")
def diffusion_cfg() -> Iterator[Check]:
    """A canvas is accepted if and only if it has a completion."""
    for schema in SCHEMAS:
        wrong, num_valid, total = _wrong_values(schema)
        yield Check(
            f"allows the values that a validator finds valid: {json.dumps(schema)}",
            not wrong and 0 < num_valid < total,
            f"{wrong} wrong of {total} values, {num_valid} valid",
        )
    for grammar, is_text in (*LANGUAGES, *((one[0], lexed(*one[1:])) for one in LEXED)):
        rules, wrong, num_completable, total = verifier(grammar), 0, 0, 0
        for length in (1, 2, 3):
            complete = texts(is_text, length)
            tested = canvases(length, 60, seed=length)
            tested += [
                tuple(MASK_POSITION if i % 2 else t for i, t in enumerate(one))
                for one in sorted(complete)
            ]
            for canvas in tested:
                expected = fits(canvas, complete)
                wrong += rules.is_completable(canvas) != expected
                num_completable, total = num_completable + expected, total + 1
                if expected and MASK_POSITION in canvas:
                    wrong += _wrong_tokens(rules, canvas, complete)
        detail = f"{wrong} wrong of {total} canvases, {num_completable} with a completion"
        yield Check(
            f"equal to trying all completions: {grammar!r}",
            not wrong and 0 < num_completable < total,
            detail,
        )
    options = ("abab", "abba", "bb", "baba", "aaa")
    script = _logits_over(b"ab")
    with bidirectional(script) as llm:
        answer = llm.generate(
            [list(PROMPT)],
            decoder="diffusion-cfg:block=0",
            constraint=Choice(options),
            max_tokens=4,
            trace=True,
        )[0]
    filled = [step["filled"] for step in answer.trace or []]
    expected_fill = _naive(script, {(*map(ord, one), *[EOS] * (4 - len(one))) for one in options})
    yield Check(
        "fills the most confident token that leaves a completion",
        ([*answer.tokens], filled) == expected_fill,
        f"{answer.text!r}",
    )


def _wrong_tokens(
    rules: CanvasGrammar, canvas: tuple[int, ...], complete: set[tuple[int, ...]]
) -> int:
    """The number of tokens judged wrongly at the last masked position, one by one and all
    together."""
    position = max(i for i, token in enumerate(canvas) if token == MASK_POSITION)
    is_valid = [
        fits((*canvas[:position], t, *canvas[position + 1 :]), complete) for t in range(END + 1)
    ]
    canvas_answer = rules.answer(canvas)
    wrong = sum(
        canvas_answer.accepts(position, token) != is_good for token, is_good in enumerate(is_valid)
    )
    return wrong + int((canvas_answer.allowed(position) != np.array(is_valid)).sum())


def _logits_over(alphabet: bytes) -> Any:
    """Logits that prefer these bytes and, slightly less, the end-of-text token."""
    inner = dense(spread=2.0)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = inner(path).copy()
        row[[*alphabet]] += 9.0
        row[EOS] = row[alphabet[0]] - 1.0
        result: np.ndarray = row
        return result

    return logits


def _naive(script: Any, complete: set[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Fills the most confident position first. If its most probable token leaves no completion, all
    such tokens are removed and the positions are ranked again."""
    canvas, filled = [*PROMPT, *[MASK] * 4], []
    start = len(PROMPT)
    while MASK in canvas:
        rows = {i: script((*canvas, i)).copy() for i, t in enumerate(canvas) if t == MASK}
        while True:
            probabilities = {i: softmax(row) for i, row in rows.items()}
            position = max(probabilities, key=lambda i: (probabilities[i].max(), -i))
            token = int(probabilities[position].argmax())
            current = [MASK_POSITION if t == MASK else t for t in canvas[start:]]
            fit = [
                fits((*current[: position - start], t, *current[position - start + 1 :]), complete)
                for t in range(len(rows[position]))
            ]
            if fit[token]:
                break
            rows[position][~np.array(fit)] = -np.inf
        canvas[position] = token
        if token == EOS:
            canvas[position:] = [EOS] * len(canvas[position:])
        filled.append([position])
    tokens = canvas[start:]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens, filled


@measure("diffusion-cfg", "answers that do not parse", samples=64, margin=0.0)
def unparsed(samples: int) -> float:
    """Records parsed as JSON, for prompts that ask for one and for others."""

    kinds = (("json", 0.0), ("json", 1.5), ("copy", 0.7), ("chain", 1.5))
    wrong = total = 0
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
            total += len(answers)
            wrong += sum(not _is_record(answer.text) for answer in answers)
    return wrong / total


@measure("diffusion-cfg", "answers that are invalid under their schema", samples=48, margin=0.0)
def invalid(samples: int) -> float:
    """Records, lists and recursive objects, at temperatures at which the model itself errs."""
    wrong = total = 0
    node = {"type": "object", "properties": {"a": {"$ref": "#"}, "age": {"type": "integer"}}}
    record = {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": record, "required": ["name", "age"]},
        {"type": "array", "items": {"enum": ["Ada", 31, None]}, "minItems": 2},
        node,
    ]
    with LLM("tiny-diffusion", threads=1) as llm:
        for schema in schemas:
            for temperature in (0.0, 1.5):
                answers = llm.generate(
                    [one.prompt for one in examples("json", samples // 6, seed=7)],
                    decoder="diffusion-cfg",
                    constraint=JsonSchema(schema),
                    max_tokens=20,
                    temperature=temperature,
                    seed=3,
                )
                validator = jsonschema_rs.validator_for(schema)
                total += len(answers)
                wrong += sum(not _is_valid(validator, answer.text) for answer in answers)
    return wrong / total


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


@measure("diffusion-cfg", "correct records lost because of the constraint", samples=48, margin=0.02)
def lost(samples: int) -> float:
    """The share of questions, relative to the same filling order without a constraint."""

    questions = [*examples("json", samples, seed=7)]
    right = []
    with LLM("tiny-diffusion", threads=1) as llm:
        for constraint in (None, Grammar(RECORD)):
            answers = llm.generate(
                [one.prompt for one in questions],
                decoder="diffusion-cfg",
                constraint=constraint,
                max_tokens=24,
            )
            right.append(sum(e.is_right(a.text) for e, a in zip(questions, answers, strict=True)))
    return (right[0] - right[1]) / samples


def _is_record(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
