"""What model families write around their thoughts and tool calls, taken apart while it streams.

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
    """How a family writes a call: between `opening` and `closing` (to the end of the answer where
    there is none), as JSON with `name` and the arguments under `arguments`."""

    opening: str
    closing: str
    arguments: str = "arguments"
    listed: bool = False  # one JSON list of calls instead of one call


#: By name: hermes (Qwen, Hermes, SmolLM and many more), mistral, llama (version 3.1 and later).
TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", listed=True),
    "llama": ToolFormat("<|python_tag|>", "", arguments="parameters"),
}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called `name`; "auto" goes by the chat template, and takes hermes if in doubt."""
    if name == "none":
        return None
    if name == "auto":
        for known, style in TOOL_FORMATS.items():
            if template is not None and style.opening in template:
                return TOOL_FORMATS[known]
        return TOOL_FORMATS["hermes"]
    found: ToolFormat = _known(TOOL_FORMATS, name, "tool parser")
    return found


def reasoning_tags(name: str, template: str | None) -> tuple[str, str] | None:
    """The tags called `name`; "auto" takes those in the chat template, or `<think>`."""
    if name == "none":
        return None
    if name == "auto":
        for tags in REASONING_TAGS.values():
            if template is not None and tags[1] in template:
                return tags
        return REASONING_TAGS["think"]
    found: tuple[str, str] = _known(REASONING_TAGS, name, "reasoning parser")
    return found


def _known(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise InvalidRequestError(f"no {what} {name!r}: there are auto, none, {', '.join(table)}")
    return table[name]


class Splitter:
    """Cuts streamed text at an opening and a closing tag. Text that may become a tag is held
    back. `inside` tells whether the next text stands between the tags."""

    def __init__(self, opening: str, closing: str, inside: bool = False) -> None:
        self._tags = (opening, closing)
        self.inside = inside
        self._held = ""

    def push(self, text: str, final: bool = False) -> Iterator[tuple[bool, str, bool]]:
        """(whether inside, text, whether a tag ended this stretch), in order."""
        if text and not self._held and self._tags[self.inside][:1] not in text:
            yield self.inside, text, False  # nothing here can begin a tag, as nearly always
            return
        self._held += text
        while True:
            tag = self._tags[self.inside]
            position = self._held.find(tag) if tag else -1
            if position < 0:
                break
            yield self.inside, self._held[:position], True
            self._held = self._held[position + len(tag) :]
            self.inside = not self.inside
        keep = 0 if final or not tag else _overlap(self._held, tag)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        if ready:
            yield self.inside, ready, False


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` with which `tag` begins."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class Parser:
    """Events of one answer. Both parts are optional; without them all text is content.
    `thinking` says that the prompt has opened the reasoning already."""

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
        self.num_calls = 0

    def push(self, text: str, final: bool = False) -> Iterator[Event]:
        """Events that `text` completes; `final` flushes what is held back."""
        if self._reasoning is None:
            yield from self._said(text, final)
            return
        for inside, part, closed in self._reasoning.push(text, final):
            if inside:
                if part:
                    yield "reasoning", part
                self._trim = self._trim or closed
            else:
                yield from self._said(part, False)
        if final:
            yield from self._said("", True)

    def _said(self, text: str, final: bool) -> Iterator[Event]:
        if self._trim and text:
            text = text.lstrip("\n")
            self._trim = not text
        if self._tools is None:
            if text:
                yield "content", text
            return
        for inside, part, closed in self._tools.push(text, final):
            if not inside:
                if part and not (self.num_calls and not part.strip()):
                    yield "content", part
                continue
            self._call += part
            if closed:
                yield from self._called()
        if final and self._call:
            yield from self._called()

    def _called(self) -> Iterator[Event]:
        assert self._format is not None
        written, self._call = self._call, ""
        calls = read_calls(written, self._format)
        if not calls:
            yield "content", self._format.opening + written + self._format.closing
        for call in calls:
            self.num_calls += 1
            yield "tool", call


def read_calls(written: str, style: ToolFormat) -> list[dict[str, str]]:
    """The calls in what stood between the tags; none where it is not what it should be."""
    try:
        value = json.loads(written)
    except ValueError:
        return []
    calls = value if style.listed and isinstance(value, list) else [value]
    found = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get(style.arguments, call.get("arguments", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        found.append({"name": call["name"], "arguments": arguments})
    return found
