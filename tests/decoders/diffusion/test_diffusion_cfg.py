"""Grammars on canvases: the verifier against every completion parsed by lark, and finished answers
against independent parsers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import lark
import numpy as np
import pytest
from typer.testing import CliRunner

from anydecode import Choice, Grammar, JsonSchema, Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts, scripted_llm
from anydecode.certification.oracles.diffusion.diffusion_cfg import (
    END,
    PIECES,
    RECORD,
    canvases,
    fits,
    texts,
    verifier,
)
from anydecode.cli.main import app
from anydecode.constraints.byte_cache import ByteCache
from anydecode.constraints.grammar import byte_grammar as byte_grammar_module
from anydecode.constraints.grammar.byte_grammar import byte_grammar
from anydecode.constraints.grammar.byte_regex import read_regex
from anydecode.constraints.grammar.canvas_grammar import (
    MASK_POSITION,
    CanvasAnswer,
    CanvasGrammar,
    RegularAnswer,
)
from anydecode.constraints.json.schema_grammar import canvas_grammar_of
from anydecode.errors import AnydecodeError, ConstraintError
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from certificates import assert_certified, assert_rejected
from tiny_models import hf_model, own_model

JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
array: "[" [value ("," value)*] "]"
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt])*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
%ignore /[ \t\n]+/
"""
GRAMMARS = (
    'start: l\nl: l "," X | X\nX: "a".."b"',
    'start: x x\nx: "a" y | \ny: x "b" | "b"?',
    'start: e\ne: e "+" t | t\nt: "(" e ")" | "a"',
    '%ignore " "\nstart: "a" ("b" "a")~1..2 | "(" start? ")"',
    'start: /(ab){2,}|[^ab)]/ ["b"]\n  | "b" -> alias',
)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("diffusion-cfg")


def test_certificate_rejects_a_canvas_without_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanvasGrammar, "is_completable", lambda self, canvas: True)
    assert_rejected("diffusion-cfg")


def without_the_longest_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "anydecode.constraints.grammar.longest_match._Places.next_bytes", lambda self, state: 0
    )
    monkeypatch.setattr(byte_grammar_module, "_grammars", ByteCache(1 << 20))


@pytest.mark.slow
def test_certificate_rejects_terminals_that_need_not_be_the_longest_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_the_longest_match(monkeypatch)
    assert_rejected("diffusion-cfg")


@pytest.mark.slow
def test_certificate_rejects_a_schema_whose_bounds_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "anydecode.constraints.json.schema_grammar._number",
        lambda schema, is_integer: read_regex("-?(0|[1-9][0-9]*)"),
    )
    assert_rejected("diffusion-cfg")


def num_mistakes(rules: CanvasGrammar, grammar: str) -> int:
    """The number of canvases, and of tokens at masks, for which the verifier differs from trying
    all completions."""
    parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

    @cache
    def parses(text: str) -> bool:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    wrong = 0
    for length in (1, 2, 3):
        whole = texts(parses, length)
        draw = Random(length)
        some = [tuple(MASK_POSITION if draw.random() < 0.5 else t for t in one) for one in whole]
        for canvas in canvases(length, 30, seed=9) + draw.sample(some, min(30, len(some))):
            wrong += rules.is_completable(canvas) != fits(canvas, whole)
            if MASK_POSITION in canvas and fits(canvas, whole):
                position = canvas.index(MASK_POSITION)
                good = [
                    fits((*canvas[:position], token, *canvas[position + 1 :]), whole)
                    for token in range(END + 1)
                ]
                answer = rules.answer(canvas)
                wrong += [answer.accepts(position, token) for token in range(END + 1)] != good
                wrong += answer.allowed(position).tolist() != good
    return wrong


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_canvas_is_accepted_if_and_only_if_it_has_a_completion(grammar: str) -> None:
    assert num_mistakes(verifier(grammar), grammar) == 0


def test_a_verifier_that_allows_empty_masks_is_detected() -> None:
    class Loose(CanvasGrammar):
        def advance_mask(self, chart: Any, items: Any, trie: Any) -> Any:
            ahead = super().advance_mask(chart, items, trie)
            return chart.close({**ahead, **{s: o | ahead.get(s, 0) for s, o in items.items()}})

    right = verifier(GRAMMARS[2])
    assert num_mistakes(Loose(right.grammar, right.vocabulary, right.ends), GRAMMARS[2]) > 0


def test_a_long_token_among_many_spellings_completes_a_recursive_grammar() -> None:
    """It has more nodes of the trie before it than a mask once took."""
    long = b"abcdabcdabcd"
    spelled = [bytes(one) for size in range(1, 6) for one in product(b"abcd", repeat=size)]
    pieces = (*spelled, b"(", b")", b"((", long)
    rules = verifier('start: "(" start ")" | "abcdabcdabcd"', pieces)
    opened, closed = pieces.index(b"("), pieces.index(b")")
    canvas = [opened, MASK_POSITION, closed]
    assert rules.is_completable(canvas)
    assert np.flatnonzero(rules.answer(canvas).allowed(1)).tolist() == [pieces.index(long)]
    assert rules.is_completable([pieces.index(b"(("), *canvas[1:], closed])
    assert not rules.is_completable([*canvas, closed])


def test_a_vocabulary_without_a_token_of_the_grammar_completes_nothing() -> None:
    rules = verifier('start: "(" start ")" | "x"', (b"a", b"b"))
    assert not rules.is_completable([MASK_POSITION])
    assert not rules.answer([MASK_POSITION]).allowed(0).any()


@pytest.mark.slow
def test_states_that_lead_nowhere_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    completing = RegularAnswer.completing

    def early(self: RegularAnswer, position: int) -> np.ndarray:
        return completing(self, min(position + 1, len(self.canvas)))

    monkeypatch.setattr(RegularAnswer, "completing", early)
    assert num_mistakes(verifier(GRAMMARS[4]), GRAMMARS[4]) > 0
    assert_rejected("diffusion-cfg")


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^\s\d"]+é?',
        r"(?:ab?|c{2}|\d+?)*[^a-c]",
        r"[]\-^a-c]+|é[à-ü]?\x41\u00e9",
        r"a.b|[\[\]{}]{1,2}",
        r"(?P<x>a|)b{0,3}c{2,}",
    ],
)
def test_regular_expressions_agree_with_python(pattern: str) -> None:
    grammar = byte_grammar(Regex(pattern).guidance())
    assert grammar.is_regular
    draw, agreed = Random(3), set()
    for _ in range(1500):
        text = "".join(draw.choice('abc2"]-^éüA.[{\n ') for _ in range(draw.randint(0, 5)))
        state: int | None = grammar.start_states[0]
        for one in text.encode().translate(grammar.classes):
            state = None if state is None else grammar.transitions[state].get(one)
        found = state is not None and grammar.completed_rule[state] == 0
        assert found == (re.fullmatch(pattern, text) is not None), text
        agreed.add(found)
    assert agreed == {True, False}


#: Grammars with terminals that overlap, and letters for their texts.
OVERLAPPING = (
    ('start: A B\nA: /a+/\nB: "ab" | "b"', "ab"),
    ('start: "if" NAME | NAME "=" NAME\nNAME: /[a-z]+/\n%ignore " "', "if= "),
    ('start: (IF | NAME)+\nIF: "if"\nNAME: /[fi]{2,3}/', "ifx"),
    ('start: (A | B | C)+\nA: "a"\nB: "abc"\nC: "bd" | "b"', "abcd"),
    ("start: NAME NAME\nNAME: /[ab]+/\n%ignore / +/", "ab "),
    ('start: NAME ("," NAME)*\nNAME: /[ab]+/\n%ignore " "\n%ignore "_"', "a,_ "),
    ('start: e\ne: e "-" e | e "--" | "-" e | "1"\n%ignore " "', "1- "),
    ('start: "a" "/" "a" | "a" "a"\n%ignore /\\/b*\\//', "ab/"),
    ('start: "\\"" /[a]*/ "\\"" /b?/', '"ab'),
    ('start: "a" C "a"\nC: /b+|c/\n%ignore /b/', "abc"),
    ('start: "a" ("_" | "b") "a"\n%ignore "_"', "ab_"),
)


def of_bytes(grammar: str) -> CanvasGrammar:
    tokens: Any = SimpleNamespace(token_bytes=[bytes([byte]) for byte in range(256)], size=256)
    return CanvasGrammar(byte_grammar(grammar), tokens, frozenset())


def allows(rules: CanvasGrammar, text: str) -> bool:
    return rules.is_completable([*text.encode()])


def allowed_from_left_to_right(grammar: str, letters: str, length: int = 5) -> set[str]:
    """The texts of up to `length` letters that autoregressive decoders allow."""
    tokenizer = ByteTokenizer()
    found = set()
    stack = [("", Grammar(grammar).start(tokenizer, tokenizer.vocab_size))]
    while stack:
        text, state = stack.pop()
        if state.can_stop:
            found.add(text)
        mask = state.mask()
        assert mask is not None
        for letter in letters if len(text) < length else "":
            if mask[ord(letter)]:
                after = state.fork()
                after.advance(ord(letter))
                stack.append((text + letter, after))
    return found


def texts_within(letters: str) -> list[str]:
    return ["".join(one) for size in range(6) for one in product(letters, repeat=size)]


@pytest.mark.parametrize(("grammar", "letters"), OVERLAPPING)
def test_texts_are_those_that_autoregressive_decoders_allow(grammar: str, letters: str) -> None:
    ignored = " _/b" if "%ignore" in grammar else ""
    found, rules = set(), of_bytes(grammar)
    expected = allowed_from_left_to_right(grammar, letters)
    for text in texts_within(letters):
        if text == text.strip(ignored):  # before and after it, ignored text is allowed here only
            found.add(allows(rules, text))
            assert allows(rules, text) == (text in expected), text
    assert found == {True, False}


TERMINALS = (
    '"a"', '"b"', '"c"', '"ab"', '"aba"', "/a+/", "/[ab]+/", "/b?a/", "/a*b/", "/(ab)+/", "/c+/",
    "/[ab]{1,2}/", "/[bc]+/", "/a*/", "/a(bc)?/",
)  # fmt: skip


def random_grammar(draw: Random) -> str:
    """Terminals that overlap, in rules that may be recursive, with and without ignored text."""
    names = ["A", "B", "C"][: draw.randint(2, 3)]

    def rule(parts: list[str]) -> str:
        return " | ".join(
            " ".join(draw.choice(parts) + draw.choice(["", "", "?", "+"]) for _ in range(2))
            for _ in range(2)
        )

    lines = [f"start: {rule([*names, *names, 'x'])}", f"x: {rule([*names, *names, 'x'])} | A"]
    lines += [f"{name}: {draw.choice(TERMINALS)}" for name in names]
    ignored = draw.choice(["", "", '%ignore "c"', "%ignore / +/"])
    return "\n".join([*lines, ignored, ""])


def test_no_text_is_allowed_that_autoregressive_decoders_do_not_allow() -> None:
    """Of random grammars; of most of them, all other texts are allowed too."""
    draw, num_equal, total = Random(5), 0, 0
    for _ in range(40):
        grammar = random_grammar(draw)
        texts = [text for text in texts_within("abc") if len(text) < 5]
        if "%ignore" in grammar:
            texts = [text for text in texts if text == text.strip("c")]
        try:
            rules = of_bytes(grammar)
            found = {text for text in texts if allows(rules, text)}
            expected = allowed_from_left_to_right(grammar, "abc", 4) & {*texts}
        except ConstraintError:  # no finite text, or too much work for the mask engine
            continue
        assert found <= expected, grammar
        num_equal, total = num_equal + (found == expected), total + 1
    assert total > 25 and num_equal > 0.8 * total


def test_shorter_matches_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_longest_match(monkeypatch)
    grammar = OVERLAPPING[4][0]
    assert allows(of_bytes(grammar), "ab")
    assert "ab" not in allowed_from_left_to_right(grammar, "ab ")


def test_after_a_recursive_rule_what_follows_any_of_its_uses_counts_as_allowed() -> None:
    """So texts are lost, but none are allowed that autoregressive decoders do not allow."""
    grammar = 'start: v REST\nv: "[" v v? "]" | "1"\nREST: /[)\\]]*[x)]/'
    expected = allowed_from_left_to_right(grammar, "1[]x")
    rules = of_bytes(grammar)
    found = [t for t in expected if allows(rules, t)]
    assert "1x" in found and "[1]x" in expected and "[1]x" not in found
    assert not any(allows(rules, t) for t in {*texts_within("1[]x")} - expected)


def test_words_need_white_space_between_them_where_they_would_be_one() -> None:
    text = "start: NAME NAME\nNAME: /[a-z]+/\n%ignore / +/"
    with open_llm() as llm:
        for seed in range(4):
            asked: dict[str, Any] = {"seed": seed, "temperature": 1.5, "max_tokens": 12}
            found = llm.generate([1], decoder="diffusion-cfg", constraint=Grammar(text), **asked)
            assert re.fullmatch(" *[a-z]+ +[a-z]+ *", found.text)


@cache
def model(block_size: int | None = None) -> Any:
    made = own_model(hf_model("Llama", vocab_size=BYTE_VOCABULARY, initializer_range=0.5))
    made.spec = replace(made.spec, causal=False, block_size=block_size)
    return made


def open_llm(block_size: int | None = None) -> LLM:
    return LLM(model(block_size), tokenizer=ByteTokenizer(), cache_positions=1024)


#: Strings of each format, and strings that only look like it.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (
        ("2024-02-29", "2000-02-29", "1999-12-31"),
        ("2023-02-29", "1900-02-29", "2024-04-31"),
    ),
    "time": (("23:59:59Z", "00:00:00.25+01:30"), ("24:00:00Z", "23:59:59", "23:60:00Z")),
    "date-time": (("2024-05-06T07:08:09Z",), ("2024-05-06 07:08:09Z", "2024-13-06T07:08:09Z")),
    "duration": (("P1Y2M3D", "PT5M", "P4W", "P1DT1H"), ("P", "PT", "P1S", "P1Y1D", "1D")),
    "email": (("ada.b@lab-1.org",), ("ada", "@lab.org", "a..b@lab.org")),
    "hostname": (("lab-1.example.org",), ("-a.org", "a_b", "a..b")),
    "ipv4": (("192.168.0.1", "0.0.0.0"), ("1.2.3", "256.1.1.1", "01.2.3.4")),
    "ipv6": (
        ("::", "::1", "2001:db8::ff", "1:2:3:4:5:6:7:8"),
        ("1:2:3", ":::", "1::2::3", "12345::"),
    ),
    "uuid": (("123e4567-e89b-12d3-a456-426614174000",), ("123e4567e89b12d3a456426614174000",)),
    "uri": (("https://a.org/b?c=d", "urn:isbn:0-1"), ("a.org/b", "https://a b", "://a")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_are_valid(name: str) -> None:
    """Random walks through the automaton, and strings that are and are not of the format."""
    schema = {"type": "string", "format": name}
    state: Any = JsonSchema(schema).start(ByteTokenizer(), BYTE_VOCABULARY)
    grammar = canvas_grammar_of(state.origin)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    byte_of = {label: byte for byte, label in reversed([*enumerate(grammar.classes)])}
    draw = Random(4)
    for _ in range(300):
        text, at = bytearray(), grammar.start_states[0]
        while grammar.completed_rule[at] < 0 or (grammar.transitions[at] and draw.random() < 0.8):
            label = draw.choice([*grammar.transitions[at]])
            text.append(byte_of[label])
            at = grammar.transitions[at][label]
        assert validator.is_valid(json.loads(text)), bytes(text)
    tokens: Any = SimpleNamespace(token_bytes=[bytes([byte]) for byte in range(256)], size=256)
    rules = CanvasGrammar(grammar, tokens, frozenset())
    for strings, is_valid in zip(FORMATS[name], (True, False), strict=True):
        for one in strings:
            assert validator.is_valid(one) == is_valid, one
            assert rules.is_completable([*json.dumps(one).encode()]) == is_valid, one


PROMPTS = [[1, 2], [3], [4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("decoder", "size"),
    [
        pytest.param("", None, marks=pytest.mark.slow),
        (":block=5,cache=dual", None),
        (":remasking=random,block=0", None),
        ("", 4),
    ],
)
def test_answers_parse_and_are_equal_alone_batched_and_restarted(
    decoder: str, size: int | None
) -> None:
    options = {"constraint": Grammar(JSON), "max_tokens": 8, "seed": 3, "top_p": 0.95}
    options["decoder"] = f"diffusion-cfg{decoder}"
    for options["temperature"] in (1.2,) if decoder else (0.0, 1.2):
        with open_llm(size) as llm:
            alone = [llm.generate([prompt], **options)[0] for prompt in PROMPTS]
            batch = llm.generate(PROMPTS, **options)
        for answer in alone:
            json.loads(answer.text)
        assert [one.tokens for one in batch] == [one.tokens for one in alone]
        with open_llm(size) as llm, Restarts(llm.engine, seed=2):
            again = llm.generate(PROMPTS, **options)
            assert [one.tokens for one in again] == [one.tokens for one in alone]
            llm.engine.check_integrity()


def test_without_the_verifier_answers_do_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanvasAnswer, "accepts", lambda self, position, token: True)
    with open_llm() as llm:
        answers = llm.generate(
            PROMPTS, decoder="diffusion-cfg", constraint=Grammar(JSON), max_tokens=11
        )
    parsed = 0
    for answer in answers:
        try:
            json.loads(answer.text)
            parsed += 1
        except ValueError:
            pass
    assert parsed < len(answers)


def test_an_answer_without_end_of_text_fills_the_canvas() -> None:
    with open_llm() as llm:
        for pattern in ("(ab)*", "[a-c]{12}"):
            answer = llm.generate(
                [[1, 2]],
                decoder="diffusion-cfg",
                constraint=Regex(pattern),
                max_tokens=12,
                ignore_eos=True,
            )[0]
            assert len(answer.text) == 12 and re.fullmatch(pattern, answer.text)


def test_texts_are_valid_with_stop_tokens_and_another_mask_token() -> None:
    """A stop token ends the text, and the mask token never occurs in it."""
    asked: dict[str, Any] = {"constraint": Regex("a[ab]*c"), "max_tokens": 6}
    with open_llm() as llm:
        for prompt in PROMPTS:
            found = llm.generate([prompt], decoder="diffusion-cfg", stop_tokens=[*b"b"], **asked)[0]
            assert re.fullmatch("a+c", found.text)
            found = llm.generate([prompt], decoder=f"diffusion-cfg:mask={ord('b')}", **asked)[0]
            assert re.fullmatch("a+c", found.text)
        with pytest.raises(AnydecodeError, match="at most 6 tokens"):
            asked["constraint"] = Regex("ab")
            llm.generate([[1]], decoder=f"diffusion-cfg:mask={ord('b')}", **asked)


def test_a_grammar_with_white_space_that_could_go_on_forever_is_read() -> None:
    """`Grammar` tells llguidance not to force tokens there, which is no rule of the grammar."""
    words = Grammar(
        'start: "do" /[ ]+/ NAME /[ ]+/ "at" /[ ]+/ NAME\nNAME: /[a-z]+/\n%ignore /\\n+/'
    )
    assert "no_forcing" in words.guidance()
    with open_llm() as llm:
        found = llm.generate([1, 2], decoder="diffusion-cfg", constraint=words, max_tokens=14)
    lines = r"\n*do\n* +\n*[a-z]+\n* +\n*at\n* +\n*[a-z]+\n*"
    assert re.fullmatch(lines, found.text)


def infilled(llm: LLM, parts: list[str | int], begun: str = "", **options: Any) -> Any:
    tokenizer = llm.tokenizer
    tokens = list(tokenizer.encode("json name Ada age 31:"))
    for part in parts:
        tokens += [tokenizer.mask_id] * part if isinstance(part, int) else tokenizer.encode(part)
    decoder = catalogue.build("diffusion-cfg", begun=begun)
    return llm.generate([tokens], decoder=decoder, max_tokens=40, seed=1, **options)[0]


def test_several_regions_are_infilled_so_that_the_whole_parses() -> None:
    parts: list[str | int] = [' {"', 2, '": "', 2, '", "', 1, '": ', 3, "}"]
    with LLM("tiny-diffusion", threads=1) as llm:
        for temperature in (0.0, 2.0, 4.0):
            answer = infilled(llm, parts, ' {"', constraint=Grammar(JSON), temperature=temperature)
            text = ' {"' + answer.text
            assert len(json.loads(text)) >= 1 and text.endswith("}") and '": "' in text
            assert answer.constraint["complete"] and len(answer.tokens) <= 30
        loose = infilled(llm, parts, temperature=4.0)
        with pytest.raises(ValueError):
            json.loads(' {"' + loose.text)
        with pytest.raises(AnydecodeError, match=r"cannot satisfy.* 3 masks"):
            infilled(llm, [1, '"name": ]', 2], constraint=Grammar(JSON))
        with pytest.raises(AnydecodeError, match="does not end with"):
            infilled(llm, [1, "}"], "[", constraint=Grammar(JSON))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Choice(["abcdefghijkl", "bcdefghijklm"]), "at most 8 tokens .* max_tokens is too small"),
        (Grammar('start: start "a"'), "cannot be met"),
        (Grammar("start: %json {}"), "unexpected '%'"),
        (JsonSchema({"type": "number", "multipleOf": 5003}), "does not support multipleOf 5003"),
        (JsonSchema({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}), r"\$ref to another schema"),
        (JsonSchema({"type": "integer"}, engine="xgrammar"), "engine llguidance"),
        (Regex("(a|b)*a(a|b){25}"), "too large"),
    ],
)
def test_unsatisfiable_or_unsupported_constraints_raise_one_line_errors(
    constraint: Any, message: str
) -> None:
    if getattr(constraint, "engine", None) == "xgrammar":
        pytest.importorskip("xgrammar")
    with scripted_llm(causal=False) as llm, pytest.raises(AnydecodeError, match=message) as caught:
        llm.generate("x", decoder="diffusion-cfg", constraint=constraint, max_tokens=8)
    assert "\n" not in str(caught.value)


def test_other_invalid_requests_raise_one_line_errors() -> None:
    asked: dict[str, Any] = {"decoder": "diffusion-cfg", "max_tokens": 4}
    with scripted_llm(causal=False) as llm:
        with pytest.raises(AnydecodeError, match="penalties"):
            llm.generate("x", constraint=Regex("a+"), repetition_penalty=1.2, **asked)
        banned = {token: float("-inf") for token in (*b"ab",)}
        with pytest.raises(AnydecodeError, match="rules out every token|no token is allowed"):
            llm.generate("x", constraint=Regex("[ab]"), logit_bias=banned, **asked)


def test_grammars_and_regular_expressions_on_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        head = ["generate", "json name Ada age 31:", "--model", "tiny-diffusion", "--json"]
        return CliRunner().invoke(app, [*head, "--decoder", "diffusion-cfg", *arguments])

    (tmp_path / "record.lark").write_text(RECORD)
    (tmp_path / "word.gbnf").write_text('root ::= " " word+\nword ::= "Ada" | "Mia"')
    found = run("--grammar", str(tmp_path / "record.lark"), "--max-tokens", "20")
    assert json.loads(json.loads(found.stdout)["text"]) == {"name": "Ada", "age": 31}
    found = run("--grammar", str(tmp_path / "word.gbnf"), "--max-tokens", "8")
    assert re.fullmatch(" (Ada|Mia)+", json.loads(found.stdout)["text"])
    found = run("--regex", "( Zoe| Mia){2}", "--max-tokens", "8")
    assert re.fullmatch("( Zoe| Mia){2}", json.loads(found.stdout)["text"])
    both = run("--regex", "a", "--grammar", "x.lark")
    assert both.exit_code and "give only one" in str(both.exception or both.output)
    assert run("--grammar", str(tmp_path / "none.lark")).exit_code


def test_the_oracle_vocabulary_has_tokens_of_several_bytes() -> None:
    assert {len(piece) for piece in PIECES} == {1, 2}
