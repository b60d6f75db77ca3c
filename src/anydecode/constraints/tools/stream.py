"""Parsing of text that arrives in parts.

Parsers are generators: they yield events, and None where they need more text. An event is a kind
and a text: ("content", text), ("call", name), ("arguments", JSON text) or ("end", "").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from typing import Any, TypeVar

Event = tuple[str, str]
_Result = TypeVar("_Result")
Steps = Generator[Event | None, None, _Result]

_STRUCTURE = re.compile(r'["\\{}\[\]]')
#: At the end of a text that was cut, so many characters of a tag or more are no text. Behind a call
#: there is no text, so that one is enough, in any text.
MIN_CUT_TAG = 2
#: The start of a call as a JSON object, up to the end of its name, which is a valid string of JSON,
#: and up to its arguments.
_NAME = (
    r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"(?:name|tool_name)"\s*:\s*'
    r'("[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*")'
)
_NAME_START = re.compile(_NAME)
_CALL_START = re.compile(_NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])')


class TextStream:
    """Text that arrives in parts. `num_taken` counts the characters that were parsed, and `is_cut`
    is whether the text ended before its own end. `follows_call`: whether it has a call."""

    def __init__(self) -> None:
        self.buffer = ""
        self.is_final = self.is_cut = self.follows_call = False
        self.num_taken = 0

    def run(
        self, steps: Steps[Any], text: str, final: bool = False, is_cut: bool = False
    ) -> Iterator[Event]:
        """Appends `text` and yields the events of `steps` that it completes. `final`: whether the
        text ends with it, and `is_cut`, whether within a token limit."""
        self.buffer += text
        if is_cut:  # also within a character
            self.buffer = self.buffer.rstrip("\ufffd")
        self.is_final, self.is_cut = final, is_cut
        for event in steps:
            if event is None:
                return
            self.follows_call = self.follows_call or event[0] == "call"
            yield event

    def take(self, count: int) -> str:
        """Removes and returns the first `count` characters of the buffer."""
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        self.num_taken += count
        return text

    def until(self, *tags: str, kind: str = "content") -> Steps[str]:
        """Yields the text before the first of `tags` as events, the longest one of those that start
        there. Returns the tag, which is removed; empty if the text ended."""
        while True:
            found = [(at, -len(tag), tag) for tag in tags if (at := self.buffer.find(tag)) >= 0]
            if found:
                position, _, tag = min(found)
                if position:
                    yield kind, self.take(position)
                if _is_prefix(self.buffer, tags):  # of a longer one
                    if self.is_final:
                        self.take(len(self.buffer))
                        return ""
                    yield None
                    continue
                self.take(len(tag))
                return tag
            num_kept = max(overlap(self.buffer, tag) for tag in tags)
            if self.is_final and not (kind == "content" and self.follows_call):
                is_word = self.buffer[len(self.buffer) - num_kept :].isalpha()
                if is_word or not self.is_cut or num_kept < MIN_CUT_TAG:
                    num_kept = 0
            if len(self.buffer) > num_kept:
                yield kind, self.take(len(self.buffer) - num_kept)
            if self.is_final:
                self.take(num_kept)
                return ""
            yield None

    def rest(self) -> Steps[None]:
        """Yields the rest of the text as events."""
        while True:
            if self.buffer:
                yield "content", self.take(len(self.buffer))
            if self.is_final:
                return
            yield None

    def read_until(self, tag: str, *, removes: bool = True) -> Steps[str | None]:
        """Returns the text before `tag`, which is removed, as is the tag if it `removes` it. None
        if the text ended: the rest of it is removed."""
        text, is_complete = yield from self.read_part(tag, removes=removes)
        return text if is_complete else None

    def read_part(self, tag: str, *, removes: bool = True) -> Steps[tuple[str, bool]]:
        """Returns the text before `tag`, and whether the tag follows, as `read_until`."""
        while tag not in self.buffer:
            if self.is_final:
                return self.take(len(self.buffer)), False
            yield None
        text = self.take(self.buffer.index(tag))
        self.take(len(tag) * removes)
        return text, True

    def read_name(
        self,
        tag: str,
        names: Set[str],
        read: Callable[[str], str] = str.strip,
        *,
        removes: bool = True,
    ) -> Steps[str | None]:
        """Returns the name before `tag`, as `read_until`. If the text ended, it is returned only if
        all of it must be there: if a part of the tag follows, or no other name starts with it.

        Args:
            tag: The text behind the name.
            names: The known names.
            read: Returns the name that a text contains.
            removes: Whether `tag` is removed.
        """
        text, is_complete = yield from self.read_part(tag, removes=removes)
        if is_complete:
            return read(text)
        return cut_name(text, tag, names, read)

    @property
    def has_ended(self) -> bool:
        """Whether all of the text was parsed."""
        return self.is_final and not self.buffer

    def next_of(self, *tags: str, removes: bool = True) -> Steps[str]:
        """Returns which of `tags` comes next, after white space, and removes both. Empty, and
        nothing is removed, if none of them does, except a part of one in which the text ends.
        `removes`: whether anything is removed."""
        while True:
            text = self.buffer.lstrip()
            for tag in tags:
                if text.startswith(tag):
                    if removes:
                        self.take(len(self.buffer) - len(text) + len(tag))
                    return tag
            if not any(tag.startswith(text) for tag in tags):
                return ""
            if self.is_final:
                if removes:
                    self.take(len(self.buffer))
                return ""
            yield None

    def starts_with(self, tag: str) -> Steps[bool]:
        """Returns whether `tag` comes next; removes it if so."""
        while not self.buffer.startswith(tag):
            if self.is_final or not tag.startswith(self.buffer):
                return False
            yield None
        self.take(len(tag))
        return True

    def text_value(self, closing: str) -> Steps[bool]:
        """Yields the text before `closing`, which is removed, as a JSON string in events of kind
        "arguments". Returns whether it is complete."""
        yield "arguments", '"'
        steps = self.until(closing, kind="arguments")
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                if end.value:
                    yield "arguments", '"'
                return bool(end.value)
            if event is not None:
                event = event[0], json.dumps(event[1], ensure_ascii=False)[1:-1]
            yield event

    def json_value(self) -> Steps[bool]:
        """Yields a JSON object, array or string as events of kind "arguments". Returns whether it
        is complete."""
        scanner = JsonScanner()
        while True:
            end = scanner.end(self.buffer)
            if self.buffer:
                yield "arguments", self.take(len(self.buffer) if end < 0 else end)
            if end >= 0:
                return True
            if self.is_final:
                return False
            yield None

    def json_call(self) -> Steps[bool | None]:
        """Yields a call that is a JSON object with a name and arguments, without its end. Returns
        True if it is complete, None if the text ended within it, and False, with nothing removed,
        if the text is something else."""
        scanner, num_scanned = JsonScanner(), 0
        while True:
            if match := _CALL_START.match(self.buffer):
                name = encodable(json.loads(match[1]))
                self.take(match.end())
                yield "call", name
                if not (yield from self.json_value()):
                    return None
                return True if (yield from self._end_of_object()) else None
            text = self.buffer.lstrip()
            if text[:1] not in ("", "{"):
                return False
            end = scanner.end(text[num_scanned:])
            if end >= 0:
                end += num_scanned
                call = _read_call(text[:end])
                if call is None:
                    return False
                self.take(len(self.buffer) - len(text) + end)
                yield "call", call[0]
                yield "arguments", call[1]
                return True
            num_scanned = len(text)
            if self.is_final:
                return None
            yield None

    def cut_call(self) -> Steps[None]:
        """Yields the name of a call that is a JSON object and ended before its arguments, if the
        name is complete, and removes the text."""
        match = _NAME_START.match(self.buffer)
        if match:
            yield "call", encodable(json.loads(match[1]))
        self.take(len(self.buffer))

    def _end_of_object(self) -> Steps[bool]:
        scanner = JsonScanner(depth=1)
        while True:
            end = scanner.end(self.buffer)
            self.take(len(self.buffer) if end < 0 else end)
            if end >= 0 or self.is_final:
                return end >= 0
            yield None


class JsonScanner:
    """Finds the end of a JSON object, array or string in text that arrives in parts."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def end(self, text: str) -> int:
        """The number of characters of `text`, the next part, that belong to the value; -1 if it
        does not end in it."""
        position = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        while match := _STRUCTURE.search(text, position):
            character, position = match[0], match.end()
            if self._in_string:
                if character == "\\":
                    self._is_escaped = position == len(text)
                    position += 1
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        return position
            elif character == '"':
                self._in_string = True
            elif character != "\\":
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return position
        return -1


def _is_prefix(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is the start of one of `tags` and not all of it."""
    return any(tag.startswith(text) and tag != text for tag in tags)


def overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def cut_name(
    text: str, tag: str, names: Set[str], read: Callable[[str], str] = str.strip
) -> str | None:
    """The name in a text that ended before or within `tag`; None if it may be incomplete. The
    arguments are those of `TextStream.read_name`."""
    num_cut = overlap(text, tag)
    name = read(text[: len(text) - num_cut])
    is_complete = num_cut or sum(one.startswith(name) for one in names) == 1
    return name if name in names and is_complete else None


def _read_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call in an order of its own; None if it is not a call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
    if not isinstance(name, str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json_text(arguments)
    return encodable(name), encodable(arguments)


def encodable(text: str) -> str:
    """`text` with a question mark for every lone surrogate: JSON can write it, UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def json_text(value: Any) -> str:
    """`value` as JSON, with escapes only if it has lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if encodable(text) != text else text
