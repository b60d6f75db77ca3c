"""The format of gpt-oss (harmony): every answer consists of messages on channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import Call, CallRules, JsonRule, NamedCalls
from anydecode.constraints.tools.stream import Steps, TextStream, cut_name

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_RECIPIENT = " to=functions."


@dataclass(frozen=True)
class HarmonyCalls(NamedCalls):
    """Calls as messages to a function. A message with a call ends the answer, so there is at most
    one. Messages on the channel `analysis` are the reasoning."""

    before: str = f"{_CHANNEL}commentary{_RECIPIENT}"
    between: str = f" <|constrain|>json{_MESSAGE}"
    reasoning_opening: str = f"{_CHANNEL}analysis{_MESSAGE}"

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        rules = super().rules(schemas, json_rule)
        return CallRules(rules.first, "", rules.rules, inexact=rules.inexact)

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        kind = "content"
        while True:
            tag = yield from stream.until(_CHANNEL, _END, _START, kind=kind)
            if not tag:
                return
            if tag == _START:  # the role of the next message
                if (yield from stream.read_until(_CHANNEL, removes=False)) is None:
                    return
            elif tag == _CHANNEL:
                header, is_complete = yield from stream.read_part(_MESSAGE)
                kind = "reasoning" if header.startswith("analysis") else "content"
                _, recipient, rest = header.partition(_RECIPIENT)
                name, space, _ = rest.partition(" ")
                if not is_complete and not space:
                    name = cut_name(name, " ", schemas.keys()) or ""
                if recipient and name:
                    yield "call", name
                    if not (yield from stream.json_value()):
                        return
                    yield "end", ""

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        return super().render(calls[:1], schemas)
