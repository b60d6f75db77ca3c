"""Structural tags: JSON between tags in free text."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from anydecode.constraints.structural_tag import StructuralTag  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402

TOKENIZER = ByteTokenizer()
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[", "schema": {"type": "null"}, "end": "]"},
    ],
    "triggers": ["<f=", "["],
}


def accepts(text: str, tag: Any = TAG) -> bool:
    state = StructuralTag(tag).start(TOKENIZER, TOKENIZER.vocab_size)
    for byte in text.encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
    return state.can_stop


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("plain text, <f and all", True),
        ("so <f=a>3</f> and <f=b>true</f>.", True),
        ("<f=b>true</f>[null]<f=a>1</f>", True),
        ("<f=a>true</f>", False),
        ("<f=c>1</f>", False),
        ("so <f=a>3", False),
        ("a [list]", False),
    ],
)
def test_every_trigger_starts_a_structure(text: str, is_allowed: bool) -> None:
    assert accepts(text) == is_allowed
    assert accepts(text, json.dumps(TAG)) == is_allowed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"triggers": ["{"]}, "no trigger starts the tag '<f=a>'"),
        ({"triggers": []}, "format.triggers must be texts"),
        ({"structures": []}, "format.tags must be a list that is not empty"),
        ({"structure": []}, "has the unknown field structure"),
        ({"structures": [{"begin": "["}]}, "with begin, schema and end"),
        ({"structures": [{"begin": "[", "schema": False, "end": "]"}]}, "no text can satisfy"),
        (
            {"structures": [{"begin": "[", "schema": {"uniqueItems": True}, "end": "]"}]},
            r"rules that are validated \(uniqueItems",
        ),
    ],
)
def test_unusable_tags_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConstraintError, match=problem):
        accepts("", {**TAG, **change})


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


JSON = {"type": "json_schema", "json_schema": NUMBER}
TEXT = {"type": "any_text"}
TAGS = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", const("x"), "</f>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ",", "tags": TAGS}


@pytest.mark.parametrize(
    ("node", "allowed", "others"),
    [
        (const('a\n"b'), ['a\n"b'], ["", "a"]),
        (const(""), [""], ["a"]),
        (JSON, ["7"], ["10", ""]),
        ({"type": "regex", "pattern": "a/b{2}\n"}, ["a/bb\n"], ["a/b\n"]),
        ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= [0-9]'}, ["a5"], ["a", "ab"]),
        ({"type": "grammar", "grammar": 'start: "{" /[a-c]{2}/ "}"'}, ["{ab}"], ["ab"]),
        (TEXT, ["", "a\nb"], []),
        ({**TEXT, "excludes": ["no"]}, ["n o"], ["a no b"]),
        ({**TEXT, "max_chars": 2}, ["", "äö"], ["abc"]),
        ({**TEXT, "max_chars": 0}, [""], ["a"]),
        ({"type": "sequence", "elements": [const("a"), JSON, TEXT]}, ["a1", "a1 b"], ["a", "1"]),
        ({"type": "sequence", "elements": [TEXT, const("b")]}, ["b", "ab"], ["a", "abb"]),
        (
            {"type": "sequence", "elements": [TRIGGERED, tag("<t>", JSON, "!"), JSON]},
            ["<t>1!2", "a<f=a>1</f>b<t>1!2"],
            ["<t>1!", "a<f=a>1</f>b"],
        ),
        (
            tag("<t>", {"type": "or", "elements": [TEXT, {**JSON}]}, "</t>"),
            ["<t>a</t>", "<t>1</t>"],
            ["<t>1</t>2</t>"],
        ),
        (
            {
                "type": "sequence",
                "elements": [{"type": "sequence", "elements": [JSON, TEXT]}, const("b")],
            },
            ["1b", "1 ab"],
            ["b", "1bb"],
        ),
        ({"type": "or", "elements": [const("a"), JSON]}, ["a", "3"], ["a3", ""]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["a", "aaa"], [""]),
        (tag("<t>", TEXT, "</t>"), ["<t>a < b</t>", "<t></t>"], ["<t>", "<t></t>a", "a"]),
        (tag("<t>", TEXT, "aa"), ["<t>aa", "<t>baa"], ["<t>aaa"]),
        (tag("<t>", {**TEXT, "max_chars": 1}, ["x", "yy"]), ["<t>ax", "<t>yy"], ["<t>aax"]),
        (tag("<t>", JSON, ["", ";"]), ["<t>1", "<t>1;"], ["1;"]),
        (tag("<t>", TRIGGERED, "</t>"), ["<t></t>", "<t>a<f=a>1</f>b</t>"], ["<t>a</t>b</t>"]),
        (TRIGGERED, ["", "a", "a<f=a>1</f>b<f=b>x</f>"], ["<f=c>", "<f=a>x</f>"]),
        ({**TRIGGERED, "excludes": ["no"]}, ["a<f=a>1</f>"], ["no", "<f=a>1</f> no"]),
        (
            {**TRIGGERED, "at_least_one": True},
            ["<f=a>1</f>", "<f=b>x</f> a <f=a>1</f>"],
            ["", "a<f=a>1</f>"],
        ),
        (
            {**TRIGGERED, "stop_after_first": True},
            ["", "a", "a<f=a>1</f>"],
            ["<f=a>1</f>a", "<f=a>1</f><f=a>1</f>"],
        ),
        (
            {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
            ["<f=a>1</f>"],
            ["", "a<f=a>1</f>", "<f=a>1</f><f=a>1</f>"],
        ),
        (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>x</f>"], ["<f=a>1</f>,", "a"]),
        ({**SEPARATED, "at_least_one": True}, ["<f=a>1</f>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<f=a>1</f>"], ["<f=a>1</f>,<f=a>1</f>"]),
    ],
)
def test_formats(node: Any, allowed: list[str], others: list[str]) -> None:
    given = {"type": "structural_tag", "format": node}
    assert all(accepts(text, given) for text in allowed)
    assert not any(accepts(text, given) for text in others)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({}, "format.type is None; it may be const_string, json_schema"),
        ("a", "format must be an object"),
        ({"type": "dispatch"}, "format.type is 'dispatch'"),
        ({"type": ["tag"]}, "format.type is"),
        ({**const("a"), "values": 1}, "format has the unknown field values"),
        ({"type": "const_string", "value": 1}, "format.value must be a string"),
        ({**JSON, "style": "qwen_xml"}, "only JSON in order is possible"),
        ({"type": "json_schema"}, "format.json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "that are validated"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look"),
        ({**TEXT, "max_tokens": 3}, "format.max_tokens is not possible here; use max_chars"),
        ({**TEXT, "max_chars": True}, "format.max_chars must be an integer, 0 to 10000"),
        ({"type": "or", "elements": []}, "format.elements must be a list that is not empty"),
        ({"type": "or", "elements": [const("a"), 5]}, "format.elements.1 must be an object"),
        (
            {"type": "repeat", "min": 2, "max": 1, "content": JSON},
            "format.max is 1, less than min",
        ),
        ({"type": "star", "content": TEXT}, "format.content is free text"),
        ({"type": "sequence", "elements": [TEXT, JSON]}, "format.elements.0 is free text: it must"),
        (tag("a", TEXT, 5), "format.end must be a string or a list of strings"),
        ({**tag("a", TEXT, ""), "begin": {"type": "token", "token": 5}}, "format.begin must be"),
        ({**TRIGGERED, "tags": [const("a")]}, "format.tags.0 must be a tag"),
        ({**TRIGGERED, "triggers": ["["]}, "no trigger starts the tag '<f=a>'"),
        ({**TRIGGERED, "at_least_one": 1}, "must be true or false"),
    ],
)
def test_unusable_formats_are_refused(node: Any, problem: str) -> None:
    with pytest.raises(ConstraintError, match=problem):
        accepts("", {"type": "structural_tag", "format": node})


def test_formats_that_are_nested_deeply_are_refused() -> None:
    def nested(depth: int) -> Any:
        node: Any = const("a")
        for _ in range(depth):
            node = {**TRIGGERED, "at_least_one": True, "tags": [tag("<f=", node, ">")]}
        return {"type": "structural_tag", "format": node}

    assert accepts("<f=" * 8 + "a" + ">" * 8, nested(8))
    with pytest.raises(ConstraintError, match="nested too deeply"):
        accepts("", nested(50))
