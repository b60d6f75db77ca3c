"""Formats in which every argument stands between tags: strings as they are, other values as
JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import Call, CallRules, JsonRule, ToolFormat, literal
from anydecode.constraints.tools.stream import Steps, TextStream
from anydecode.constraints.tools.values import (
    JSON_STYLE,
    ArgumentGrammar,
    arguments_of,
    is_text,
    tool_rules,
)


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """Calls with every argument between tags.

    Attributes:
        opening: The text before a call.
        before_name: The text between `opening` and the tool's name.
        after_name: The text behind the name.
        before_key: The text before an argument's name.
        after_key: The text between the name and the value.
        after_value: The text behind the value.
        closing: The text after a call.
    """

    opening: str
    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    closing: str

    @property
    def trigger(self) -> str:
        return self.opening

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        arguments = partial(self._arguments, json_rule)
        rules, calls, inexact = tool_rules(schemas, arguments, self._call_rule)
        call = f"{literal(self.opening)} tagged"
        return CallRules("tagged", call, [*rules, f"tagged: {calls}"], "/\\n?/", inexact=inexact)

    def _call_rule(self, name: str, arguments: str) -> str:
        """An expression of a call of the tool `name`, without the opening text."""
        head = literal(self.before_name + name + self.after_name)
        return f"{head} {arguments} {literal(self.closing)}"

    def _arguments(
        self, json_rule: JsonRule, prefix: str, schema: JsonSchema
    ) -> tuple[str, ArgumentGrammar]:
        """An expression of the arguments, and the grammar with its rules."""
        grammar = ArgumentGrammar(prefix, schema, None, json_rule)
        expressions = []
        for name, node, is_required in grammar.arguments:
            tag = literal(self.before_key + name + self.after_key)
            if is_text(schema.schema, node):
                value = grammar.raw_text(node, self.after_value)
            else:
                part = JsonSchema(grammar.part(node), **JSON_STYLE)
                value = f"{grammar.json_value(part)} {literal(self.after_value)}"
            expressions.append(f"{tag} {value}" if is_required else f"({tag} {value})?")
        return " ".join(expressions), grammar

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        while (yield from stream.until(self.opening)):
            if self.before_name and not (yield from stream.next_of(self.before_name.strip())):
                if not stream.has_ended:
                    yield "content", self.opening
                continue
            end = self.after_name.strip() or "<"
            name = yield from stream.read_name(end, schemas.keys(), removes=end != "<")
            if name is None:
                return
            yield "call", name
            schema = schemas.get(name, {})
            nodes = {argument.name: argument.schema for argument in arguments_of(schema)[0]}
            start = "{"
            while (tag := (yield from stream.next_of(*self._tags))) == self.before_key:
                key = yield from stream.read_until(self.after_key)
                if key is None:
                    return
                yield "arguments", f"{start}{json.dumps(key, ensure_ascii=False)}: "
                start = ", "
                node = nodes.get(key)
                if not (yield from self._value(stream, is_text(schema, node))):
                    return
            if not tag:
                return
            yield "arguments", "{}" if start == "{" else "}"
            yield "end", ""

    @property
    def _tags(self) -> tuple[str, str]:
        """What stands before an argument, or after the last one."""
        return self.before_key, self.closing

    def _value(self, stream: TextStream, is_text: bool) -> Steps[bool]:
        """Parses a value and the text behind it. Returns whether it is complete."""
        closing = self.after_value.rstrip()
        if not is_text:
            if (yield from stream.next_of("{", "[", '"', removes=False)):
                if not (yield from stream.json_value()):
                    return False
                return bool((yield from stream.next_of(closing.strip())))
            return bool((yield from stream.until(closing, kind="arguments")))
        if (yield from stream.starts_with("null" + closing)):
            yield "arguments", "null"
            return True
        return (yield from stream.text_value(closing))

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        return "\n".join(self._rendered(*call, (schemas or {}).get(call[0], {})) for call in calls)

    def _rendered(self, name: str, arguments: Any, schema: Any) -> str:
        nodes = {argument.name: argument.schema for argument in arguments_of(schema)[0]}
        text = self.opening + self.before_name + name + self.after_name
        for key, value in arguments.items():
            is_raw = isinstance(value, str) and is_text(schema, nodes.get(key))
            rendered = value if is_raw else json.dumps(value, ensure_ascii=False)
            text += self.before_key + key + self.after_key + rendered + self.after_value
        return text + self.closing
