"""Streaming parsers for the reasoning and tool-call formats of model families.

A parser turns text into events, each a kind and a text: ("content", text), ("reasoning", text),
("call", name of the tool), ("arguments", JSON text) and ("end", "") after a complete call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from anydecode.constraints.tools.families import TOOL_FORMATS
from anydecode.constraints.tools.formats import ToolFormat
from anydecode.constraints.tools.stream import MIN_CUT_TAG, Event, Steps, TextStream, overlap
from anydecode.errors import InvalidRequestError
from anydecode.models.tokenizer import REASONING_MARKERS, REASONING_TAGS


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called `name`; "auto" chooses by the chat template, with hermes as default."""
    if name == "none":
        return None
    if name == "auto":
        for call_format in TOOL_FORMATS.values():
            if template and all(marker in template for marker in call_format.markers):
                return call_format
        return TOOL_FORMATS["hermes"]
    named: ToolFormat = _lookup(TOOL_FORMATS, name, "tool parser")
    return named


def reasoning_tags(name: str, template: str | None) -> tuple[str, str] | None:
    """The opening and closing tag called `name`; "auto" takes those in the chat template, with
    `<think>` as default."""
    if name == "none":
        return None
    if name == "auto":
        for kind, tags in REASONING_TAGS.items():
            if template is not None and REASONING_MARKERS.get(kind, tags[1]) in template:
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

    def push(
        self, text: str, final: bool = False, is_cut: bool = False
    ) -> Iterator[tuple[bool, str, bool]]:
        """Yield (is inside, text, whether a tag ends it), in order. `final` flushes the buffer; of
        an answer that a token limit cut (`is_cut`), without a part of a tag at its end."""
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
        num_kept = overlap(self._buffer, tag) if tag else 0
        if final and not (is_cut and num_kept >= MIN_CUT_TAG):
            num_kept = 0
        ready = self._buffer[: len(self._buffer) - num_kept]
        self._buffer = self._buffer[len(ready) :]
        if ready:
            yield self.inside, ready, False


class Parser:
    """Parses one answer into events.

    Args:
        reasoning: Opening and closing reasoning tag; None if reasoning is not parsed.
        parse: Parses the answer after the reasoning; None if it contains no tool calls.
        thinking: Whether the prompt ends with the opening reasoning tag.
    """

    def __init__(
        self,
        reasoning: tuple[str, str] | None,
        parse: Callable[[TextStream], Steps[None]] | None,
        thinking: bool = False,
    ) -> None:
        self._reasoning = Splitter(*reasoning, inside=thinking) if reasoning else None
        self._stream = TextStream()
        self._steps = None if parse is None else parse(self._stream)
        self._trim = False
        self._follows_call = False
        self._white_space = ""  # after a call; dropped unless other text follows

    def push(self, text: str, final: bool = False, is_cut: bool = False) -> Iterator[Event]:
        """Yield the events that `text` completes. `final` flushes the buffered text; of an answer
        that a token limit cut (`is_cut`), without a part of a tag at its end."""
        if self._reasoning is None:
            yield from self._push_answer(text, final, is_cut)
            return
        for inside, part, closed in self._reasoning.push(text, final, is_cut):
            if inside:
                if part:
                    yield "reasoning", part
                self._trim = self._trim or closed
            else:
                yield from self._push_answer(part, False, False)
        if final:
            yield from self._push_answer("", True, is_cut)

    def _push_answer(self, text: str, final: bool, is_cut: bool) -> Iterator[Event]:
        if self._trim and text:
            text = text.lstrip("\n")
            self._trim = not text
        if self._steps is None:
            if text:
                yield "content", text
            return
        for kind, value in self._stream.run(self._steps, text, final, is_cut):
            if kind != "content":
                self._white_space, self._follows_call = "", True
            elif self._follows_call:
                value, self._white_space = self._white_space + value, ""
                if not value.strip():
                    self._white_space = value
                    continue
                self._follows_call = False
            yield kind, value
