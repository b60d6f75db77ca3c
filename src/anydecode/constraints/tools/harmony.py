"""The format of gpt-oss (harmony): every answer consists of messages on channels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import Call, CallRules, JsonRule, NamedCalls, literal
from anydecode.constraints.tools.stream import Steps, TextStream, cut_name

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_RECIPIENT = " to=functions."
_CALLED = re.compile(r"(?:^|\s)to=functions\.([^\s<]*)")


@dataclass(frozen=True)
class HarmonyCalls(NamedCalls):
    """Calls as messages to a function, which is named behind the channel or behind the role. A
    message with a call ends the answer, so there is at most one. Messages on the channel `analysis`
    are the reasoning."""

    before: str = f"{_CHANNEL}commentary{_RECIPIENT}"
    between: str = f" <|constrain|>json{_MESSAGE}"
    reasoning_opening: str = f"{_CHANNEL}analysis{_MESSAGE}"
    answer_opening: tuple[str, str] = (f"{_CHANNEL}final", _MESSAGE)
    text_openings: tuple[str, ...] = (f"{_CHANNEL}final", f"{_CHANNEL}commentary")

    @property
    def start_trigger(self) -> str:
        return _RECIPIENT

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        rules = super().rules(schemas, json_rule)
        header = f'"{_CHANNEL}commentary" (" json" | " <|constrain|>json") "{_MESSAGE}"'
        calls = [
            f"{literal(name)} {header} arguments_{number}" for number, name in enumerate(schemas)
        ]
        return CallRules(
            rules.first,
            "",
            [*rules.rules, f"by_role: {' | '.join(calls)}"],
            bare=f"{literal(_RECIPIENT)} by_role",
            others={f"{_START}assistant{_RECIPIENT}": "by_role"},
            inexact=rules.inexact,
        )

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        names, kind, called = schemas.keys(), "content", ""
        # The prompt has begun the first message.
        start = yield from stream.next_of(_RECIPIENT.strip())
        tag = _START if start else ""
        while tag := tag or (yield from stream.until(_CHANNEL, _END, _START, kind=kind)):
            if tag == _START:
                role, is_complete = yield from stream.read_part(_CHANNEL, removes=False)
                called, start = _called(start + role, names, is_complete), ""
                if called and not is_complete:
                    yield "call", called
            elif tag == _CHANNEL:
                header, is_complete = yield from stream.read_part(_MESSAGE)
                kind = "reasoning" if header.startswith("analysis") else "content"
                if called := _called(header, names, is_complete) or called:
                    yield "call", called
                    if not (yield from stream.json_value()):
                        return
                    yield "end", ""
                    called = ""
            tag = ""

    def parse_text(self, stream: TextStream) -> Steps[None]:
        yield from self.parse(stream, {})

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        return super().render(calls[:1], schemas)


def _called(header: str, names: Set[str], is_complete: bool) -> str:
    """The function that a header names; empty if there are no functions, if it names none, or if it
    may be a longer one in a header that was cut."""
    found = _CALLED.search(header)
    if found is None or not names:
        return ""
    if is_complete or found.end() < len(header):
        return found[1]
    return cut_name(found[1], "<", names) or ""
