"""The parsers of tool calls read whatever a model writes: they raise no error, work in
proportion to the text, and find in its parts what they find in the whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.constraints.tools.tool_calls import parse_answer  # noqa: E402
from anydecode.models.tokenizer import REASONING_TAGS  # noqa: E402
from anydecode.server.parsers import Parser  # noqa: E402
from steps import num_steps  # noqa: E402
from tool_format_kinds import FORMATS, KINDS  # noqa: E402

SCHEMAS: dict[str, Any] = {
    "find": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "some": {"type": ["string", "null"]},
            "number": {"type": "integer"},
            "more": {"type": "object"},
        },
        "required": ["text"],
    },
    "find_all": {"type": "object", "properties": {}},
}
CALLS = [
    ("find", {"text": 'a "b" \\ <c>\n', "number": 10**30, "more": {"x": [1, {"y": None}]}}),
    ("find_all", {}),
    ("find", {"text": "", "some": None}),
]
#: Parts of calls that are wrong or hard to read, whatever the format.
PARTS = [
    *'{}[]()"\\:,=<>|/ \n0a', "null", "None", "true", '"name"', '"arguments"', '"tool_name"',
    '{"name": "find", "arguments": ', '{"name": "\\q", "arguments": {',
    '{"arguments": {}, "name": "',
    '{"name": "a\nb", "parameters": {}}', '"\\ud800"', "\ud800", "\ufffd", "\\u", "1e999", "NaN",
    "9" * 5000, "find", "find_all", "text", "call:", "functions.", "[" * 300, '{"a":' * 300,
    "\x00", "é", "🦊",
]  # fmt: skip


def strings(value: Any) -> Iterator[str]:
    """All texts in the fields of a format."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from strings(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from strings(getattr(value, field.name))


def texts(format_name: str) -> st.SearchStrategy[str]:
    """Calls that are cut, nested and mixed with other texts."""
    call_format = TOOL_FORMATS[format_name]
    tags = sorted({text for text in strings(call_format) if text} | {"<think>", "</think>"})
    whole = [call_format.render([call], SCHEMAS) for call in CALLS]
    part = st.sampled_from([*tags, *whole]).flatmap(
        lambda text: (
            st.just(text)
            | st.tuples(st.integers(0, len(text)), st.booleans()).map(
                lambda cut: text[: cut[0]] if cut[1] else text[cut[0] :]
            )
        )
    )
    return st.lists(part | st.sampled_from(PARTS) | st.text(max_size=3), max_size=10).map("".join)


def has_tags(format_name: str) -> bool:
    """Whether an answer to a request without tools is parsed, as by `Service.parser`."""
    call_format = TOOL_FORMATS[format_name]
    return bool(call_format.reasoning_opening or call_format.answer_tags)


def events(
    format_name: str, parts: Iterable[str], *, is_cut: bool = False, mode: str = "tools"
) -> list[tuple[str, str]]:
    """The events of an answer that arrives in `parts`, those of one text joined."""
    call_format = TOOL_FORMATS[format_name]
    parse: Any = call_format.parse_text if has_tags(format_name) else None
    if mode != "text":
        parse = partial(
            parse_answer,
            call_format=call_format,
            schemas=SCHEMAS,
            has_answer=mode == "answer",
            is_required=mode == "required",
        )
    parser = Parser(REASONING_TAGS["think"], parse)
    found: list[tuple[str, str]] = []
    for part, is_final in [*((part, False) for part in parts), ("", True)]:
        for kind, value in parser.push(part, final=is_final, is_cut=is_final and is_cut):
            if found and found[-1][0] == kind and kind in ("content", "reasoning", "arguments"):
                found[-1] = kind, found[-1][1] + value
            else:
                found.append((kind, value))
    return [event for event in found if event[1] or event[0] == "end"]


@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), is_cut=st.booleans())
def test_parts_are_parsed_as_the_whole_and_nothing_raises(
    format_name: str, data: Any, is_cut: bool
) -> None:
    text = data.draw(texts(format_name))
    mode = data.draw(st.sampled_from(["tools", "answer", "required", "text"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = [0, *cuts, len(text)]
    parts = [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    whole = events(format_name, [text], is_cut=is_cut, mode=mode)
    assert events(format_name, parts, is_cut=is_cut, mode=mode) == whole
    assert events(format_name, text, is_cut=is_cut, mode=mode) == whole
    for kind, value in whole:
        json.dumps(value, ensure_ascii="\ud800" in text).encode()
        assert kind != "end" or not value


def openings(format_name: str) -> Iterator[str]:
    """Texts that begin a call and do not end."""
    call_format = TOOL_FORMATS[format_name]
    call = call_format.render([CALLS[0]], SCHEMAS)
    yield from ("", "[", "<think>", '{"name": "', call_format.trigger, call.partition("text")[0])
    yield call_format.trigger + '{"name": "'
    yield call_format.trigger + '{"name": "find", "arguments": {}'


@pytest.mark.parametrize("name", ['"\\q"', '"a\nb"', '"\\u12"'])
@pytest.mark.parametrize("format_name", ["hermes", "llama3", "mistral"])
def test_a_name_that_is_no_string_of_json_is_text(format_name: str, name: str) -> None:
    opening = TOOL_FORMATS[format_name].trigger + "[" * (format_name == "mistral")
    text = f'{opening}{{"name": {name}, "arguments": {{}}}}'
    assert events(format_name, [text]) == events(format_name, text) == [("content", text)]


@pytest.mark.parametrize(
    "order", ['"name": {0}, "arguments": {1}', '"arguments": {1}, "name": {0}']
)
def test_lone_surrogates_of_calls_can_be_sent(order: str) -> None:
    call = order.format('"\\ud800"', '{"a": "\\udfff"}')
    found = events("hermes", f"<tool_call>{{{call}}}</tool_call>")
    assert found == [("call", "?"), ("arguments", '{"a": "\\udfff"}'), ("end", "")]


@pytest.mark.parametrize("format_name", KINDS)
def test_work_is_in_proportion_to_the_text(format_name: str) -> None:
    for opening in openings(format_name):
        for part in ("{", '"a":', "a"):
            texts = (opening + part * (size // len(part)) for size in (300, 600))
            half, whole = (num_steps(partial(events, format_name, text)) for text in texts)
            assert whole <= 2 * half + 100, (opening, part)


def test_deep_values_are_no_error() -> None:
    for format_name in KINDS:
        for part in ("[", '{"a":', "{a:"):
            for opening in openings(format_name):
                for text in (opening + part * 3000, opening + part * 3000 + "]" * 3000):
                    events(format_name, [text])
                    events(format_name, [TOOL_FORMATS[format_name].trigger, text])
