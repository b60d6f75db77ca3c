"""Parsers of answers: what is content beside tool calls."""

from __future__ import annotations

from functools import partial

import pytest

from anydecode.constraints.tools.families import TOOL_FORMATS
from anydecode.server.parsers import Event, Parser, reasoning_tags

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = (("call", "f"), ("arguments", '{"a": 1}'), ("end", ""))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CALL, [*TOOL]),
        (f"{CALL}\n{CALL}\n", [*TOOL, *TOOL]),
        (f"{CALL}\nand {CALL}", [*TOOL, ("content", "\nand "), *TOOL]),
        (f"{CALL}\none two\n\nthree\n", [*TOOL, ("content", "\none two\n\nthree\n")]),
        (
            f"{CALL}\n<tool_call>[1]</tool_call>",
            [*TOOL, ("content", "\n<tool_call>[1]</tool_call>")],
        ),
        (f"\n{CALL}", [("content", "\n"), *TOOL]),
        ("\n", [("content", "\n")]),
        ("<tool_call>[1]</tool_call>", [("content", "<tool_call>[1]</tool_call>")]),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_white_space_alone_after_a_call_is_no_content(
    answer: str, expected: list[Event], size: int
) -> None:
    parser = Parser(None, lambda stream: TOOL_FORMATS["hermes"].parse(stream, {}))
    events: list[Event] = []
    parts = [answer[start : start + size] for start in range(0, len(answer), size)]
    for part in [*parts, ""]:
        for kind, value in parser.push(part, final=not part):
            if kind in ("content", "arguments") and events and events[-1][0] == kind:
                events[-1] = (kind, events[-1][1] + value)
            else:
                events.append((kind, value))
    assert events == expected


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("{{ messages }}", "<think>a</think>b"),
        ("<think>\n\n</think>", "<think>a</think>b"),
        ("<seed:think>{{ x }}</seed:think>", "<seed:think>a</seed:think>b"),
        ("[THINK]{{ x }}[/THINK]", "[THINK]a[/THINK]b"),
        ("<|channel>thought\n{{ x }}<channel|>", "<|channel>thoughta<channel|>b"),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>a<|END_THINKING|>b"),
        ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:a[BEGIN FINAL RESPONSE]b"),
        (
            "<|begin|>assistant<|think|><|end|>",
            "<|think|>a<|end|><|begin|>assistantb",
        ),
        ("'<|inner_prefix|>' '<|inner_suffix|>'", "<|inner_prefix|>a<|inner_suffix|>b"),
    ],
)
def test_the_chat_template_names_the_tags_of_the_reasoning(template: str, answer: str) -> None:
    parser = Parser(reasoning_tags("auto", template), None)
    assert list(parser.push(answer, final=True)) == [("reasoning", "a"), ("content", "b")]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_part_of_a_reasoning_tag_is_text_unless_the_answer_was_cut(is_cut: bool) -> None:
    for answer, kind, text in (("<thin", "content", ""), ("1 <", "content", "1 <"),
                               ("<think>so</thi", "reasoning", "so")):  # fmt: skip
        for parts in ([answer], list(answer)):
            parser = Parser(("<think>", "</think>"), None)
            events = [event for part in parts for event in parser.push(part)]
            events += parser.push("", final=True, is_cut=is_cut)
            whole = text if is_cut else answer.removeprefix("<think>")
            assert "".join(value for _, value in events) == whole
            assert {found for found, _ in events} <= {kind}


@pytest.mark.parametrize(
    ("format_name", "answer"),
    [
        ("command", "<|START_RESPONSE|>one [two]<|END_RESPONSE|>"),
        ("apriel", "one [two][END FINAL RESPONSE]"),
        ("gigachat", "one [two]<|message_sep|>\n\n"),
        ("gigachat-3.5", "one [two]<|message_sep|>\n\n"),
        ("solar", "<|content|>one [two]"),
        ("functionary-v3.2", "all\none [two]"),
        ("functionary-v3.2", ">>>all\none [two]"),
    ],
)
@pytest.mark.parametrize("has_tools", [False, True])
def test_the_tags_around_an_answer_are_no_content(
    format_name: str, answer: str, has_tools: bool
) -> None:
    call_format = TOOL_FORMATS[format_name]
    for parts in ([answer], list(answer)):
        parse = partial(call_format.parse, schemas={}) if has_tools else call_format.parse_text
        parser = Parser(None, parse)
        events = [event for part in parts for event in parser.push(part)]
        events += parser.push("", final=True)
        assert {kind for kind, _ in events} == {"content"}
        assert "".join(value for _, value in events) == "one [two]"
