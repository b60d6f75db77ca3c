"""The format of functionary v3.2: every part of an answer begins with its recipient, which is a
tool or everyone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import Call, CallRules, JsonRule, NamedCalls
from anydecode.constraints.tools.stream import Steps, TextStream

_PART, _END_OF_NAME, _EVERYONE = ">>>", "\n", "all\n"


@dataclass(frozen=True)
class RecipientCalls(NamedCalls):
    """Calls as parts whose recipient is a tool. Prompts of some templates end with the text that
    begins a part, so that the first part may have none."""

    before: str = _PART
    between: str = _END_OF_NAME
    text_start: str = _EVERYONE

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        starts = [name + _END_OF_NAME for name in schemas]
        return replace(super().rules(schemas, json_rule), bare="named", starts=starts)

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        names = [name + _END_OF_NAME for name in schemas]
        tag = _PART if (yield from stream.next_of(_PART)) else ""
        is_start = True
        while is_start or tag:
            found = yield from stream.next_of(*names, _EVERYONE)
            if found in names:
                yield "call", found.removesuffix(_END_OF_NAME)
                if not (yield from stream.json_value()):
                    return
                yield "end", ""
            elif tag and not found and not stream.has_ended:
                yield "content", tag
            is_start, tag = False, (yield from stream.until(_PART))

    def parse_text(self, stream: TextStream) -> Steps[None]:
        yield from self.parse(stream, {})

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        return "".join(
            self.before + name + self.between + json.dumps(arguments, ensure_ascii=False)
            for name, arguments in calls
        )
