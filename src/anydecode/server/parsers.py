"""Streaming parsers for the reasoning and tool-call formats of model families.

A parser turns text into events: ("content", text), ("reasoning", text) and ("tool", call), where
call is a dict of `name` and `arguments` (JSON text).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.models.tokenizer import REASONING_TAGS

Event = tuple[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """The tool-call format of a model family: JSON between `opening` and `closing` (up to the end
    of the answer if `closing` is empty), with the key `name` and the arguments under the key
    `arguments`."""

    opening: str
    closing: str
    arguments: str = "arguments"
    is_list: bool = False  # whether the JSON is a list of calls instead of one call


#: Tool-call formats by name: hermes (Qwen, Hermes, SmolLM and many more), mistral, llama (3.1 and
#: later).
TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", is_list=True),
    "llama": ToolFormat("<|python_tag|>", "", arguments="parameters"),
}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called `name`; "auto" chooses by the chat template, with hermes as default."""
    if name == "none":
        return None
    if name == "auto":
        for key, call_format in TOOL_FORMATS.items():
            if template is not None and call_format.opening in template:
                return TOOL_FORMATS[key]
        return TOOL_FORMATS["hermes"]
    named: ToolFormat = _lookup(TOOL_FORMATS, name, "tool parser")
    return named


def reasoning_tags(name: str, template: str | None) -> tuple[str, str] | None:
    """The opening and closing tag called `name`; "auto" takes those in the chat template, with
    `<think>` as default."""
    if name == "none":
        return None
    if name == "auto":
        for tags in REASONING_TAGS.values():
            if template is not None and tags[1] in template:
                return tags
        return REASONING_TAGS["think"]
    named: tuple[str, str] = _lookup(REASONING_TAGS, name, "reasoning parser")
    return named


def _lookup(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise InvalidRequestError(f"unknown {what} {name!r}; choose auto, none, {', '.join(table)}")
    return table[name]


class Splitter:
    """Splits streamed text at an opening and a closing tag. Text that may be the start of a tag is
    buffered. `inside` is whether the next text is between the tags."""

    def __init__(self, opening: str, closing: str, inside: bool = False) -> None:
        self._tags = (opening, closing)
        self.inside = inside
        self._buffer = ""

    def push(self, text: str, final: bool = False) -> Iterator[tuple[bool, str, bool]]:
        """Yield (is inside, text, whether a tag ends it), in order."""
        if text and not self._buffer and self._tags[self.inside][:1] not in text:
            yield self.inside, text, False  # the common case: no tag can start here
            return
        self._buffer += text
        while True:
            tag = self._tags[self.inside]
            position = self._buffer.find(tag) if tag else -1
            if position < 0:
                break
            yield self.inside, self._buffer[:position], True
            self._buffer = self._buffer[position + len(tag) :]
            self.inside = not self.inside
        num_kept = 0 if final or not tag else _overlap(self._buffer, tag)
        ready = self._buffer[: len(self._buffer) - num_kept]
        self._buffer = self._buffer[len(ready) :]
        if ready:
            yield self.inside, ready, False


def _overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class Parser:
    """Parses one answer into events.

    Args:
        reasoning: Opening and closing reasoning tag; None if reasoning is not parsed.
        tools: Tool-call format; None if tool calls are not parsed.
        thinking: Whether the prompt ends with the opening reasoning tag.
    """

    def __init__(
        self,
        reasoning: tuple[str, str] | None,
        tools: ToolFormat | None,
        thinking: bool = False,
    ) -> None:
        self._reasoning = Splitter(*reasoning, inside=thinking) if reasoning else None
        self._format = tools
        self._tools = Splitter(tools.opening, tools.closing) if tools else None
        self._call = ""
        self._trim = False
        self._follows_call = False
        self._white_space = ""  # after a call; dropped unless other text follows
        self.num_calls = 0

    def push(self, text: str, final: bool = False) -> Iterator[Event]:
        """Yield the events that `text` completes. `final` flushes the buffered text."""
        if self._reasoning is None:
            yield from self._push_answer(text, final)
            return
        for inside, part, closed in self._reasoning.push(text, final):
            if inside:
                if part:
                    yield "reasoning", part
                self._trim = self._trim or closed
            else:
                yield from self._push_answer(part, False)
        if final:
            yield from self._push_answer("", True)

    def _push_answer(self, text: str, final: bool) -> Iterator[Event]:
        if self._trim and text:
            text = text.lstrip("\n")
            self._trim = not text
        if self._tools is None:
            if text:
                yield "content", text
            return
        for inside, part, closed in self._tools.push(text, final):
            if not inside:
                if self._follows_call:
                    part, self._white_space = self._white_space + part, ""
                    if not part.strip():
                        self._white_space = part
                        continue
                    self._follows_call = False
                if part:
                    yield "content", part
                continue
            self._call += part
            if closed:
                yield from self._finish_call()
        if final and self._call:
            yield from self._finish_call()

    def _finish_call(self) -> Iterator[Event]:
        assert self._format is not None
        text, self._call = self._call, ""
        calls = read_calls(text, self._format)
        if not calls:
            answer = self._format.opening + text + self._format.closing
            yield "content", self._white_space + answer
        self._white_space, self._follows_call = "", bool(calls)
        for call in calls:
            self.num_calls += 1
            yield "tool", call


def read_calls(text: str, call_format: ToolFormat) -> list[dict[str, str]]:
    """The calls in the text between the tags; empty if it is not valid."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    calls = value if call_format.is_list and isinstance(value, list) else [value]
    found = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get(call_format.arguments, call.get("arguments", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        found.append({"name": call["name"], "arguments": arguments})
    return found
