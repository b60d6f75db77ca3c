"""Formats in which every argument stands between tags: strings as they are, other values as
JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import Call, CallRules, JsonRule, ToolFormat, literal
from anydecode.constraints.tools.stream import Steps, TextStream
from anydecode.constraints.tools.values import (
    ArgumentGrammar,
    allows_type,
    arguments_of,
    is_text,
    open_argument,
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
        after_key: The text between the name and the value, or its kind.
        after_value: The text behind the value.
        closing: The text after a call.
        block: The texts before and behind all calls; empty if there are none.
        kinds: The texts that say, before a value, that it is a string as it is, or JSON; empty if
            nothing says it.
    """

    opening: str
    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    closing: str
    block: tuple[str, str] = ("", "")
    kinds: tuple[str, str] = ("", "")
    name_end = "<"

    @property
    def trigger(self) -> str:
        return self.block[0] or self.opening

    @property
    def string_end(self) -> str:
        return self.after_value

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:

        def arguments(prefix: str, schema: JsonSchema) -> tuple[str, ArgumentGrammar]:
            return self._arguments(json_rule, prefix, schema, schema.whole.schema)

        rules, calls, inexact = tool_rules(schemas, arguments, self._call_rule)
        rules = [*rules, f"tagged: {calls}"]
        call = f"{literal(self.opening)} tagged"
        if self.block[0]:
            return CallRules(call, call, rules, "", literal(self.block[1]), inexact=inexact)
        return CallRules("tagged", call, rules, "/\\n?/", inexact=inexact)

    def _call_rule(self, name: str, arguments: str) -> str:
        """An expression of a call of the tool `name`, without the opening text."""
        head = literal(self.before_name + name + self.after_name)
        return f"{head} {arguments} {literal(self.closing)}"

    def _arguments(
        self, json_rule: JsonRule, prefix: str, schema: JsonSchema, root: Any
    ) -> tuple[str, ArgumentGrammar]:
        """An expression of the arguments, and the grammar with its rules. `root`: the schema by
        which calls are parsed."""
        grammar = ArgumentGrammar(prefix, schema, None, json_rule)
        parsed = _schemas_by_name(root)
        expressions = []
        for name, node, is_required in grammar.arguments:
            tag = literal(self.before_key + name + self.after_key)
            value = self._value_rule(grammar, node, root, parsed.get(name))
            expressions.append(f"{tag} {value}" if is_required else f"({tag} {value})?")
        return " ".join(expressions), grammar

    def _value_rule(self, grammar: ArgumentGrammar, node: Any, root: Any, parsed: Any) -> str:
        """An expression of the values under the schema `node` and the texts around them. Where
        nothing says whether a value is a string as it is, `parsed` does, the schema in `root` by
        which the value is parsed."""
        kinds = self.kinds
        if not kinds[0]:
            if is_text(root, parsed):
                has_null = allows_type(root, parsed, "null")
                text = grammar.raw_text(node, self.after_value, has_null=has_null)
                return text or grammar.any_text(node, self.after_value)
            return f"{grammar.part(node)} {literal(self.after_value)}"
        is_raw = is_text(grammar.root, node)
        options = []
        if is_raw:
            text = grammar.raw_text(node, self.after_value, has_null=False)
            options.append(f"{literal(kinds[0])} {text}" if text else "")
        elif allows_type(grammar.root, node, "string"):
            text = grammar.any_text(node, self.after_value)
            options.append(f"{literal(kinds[0])} {text}")
        if not is_raw:
            value = f"{grammar.part(node)} {literal(self.after_value)}"
            options.append(f"{literal(kinds[1])} {value}")
        elif allows_type(grammar.root, node, "null"):
            options.append(literal(kinds[1] + "null" + self.after_value))
        options = [*filter(None, options)] or [grammar.any_text(node, self.after_value)]
        return f"({' | '.join(options)})"

    def value_rules(
        self, value: JsonSchema, arguments: str, schema: Any, json_rule: JsonRule
    ) -> list[str]:
        if not arguments:
            expression, grammar = self._arguments(json_rule, "part", value, schema)
            tag = self.after_name.strip()  # it is removed with the name, or else all before "<"
            head = literal(self.after_name.removeprefix(tag)) if tag else ""
            expression = f"{head} {expression} {literal(self.closing)}"
        else:
            name = open_argument(arguments)
            if name is None:
                return super().value_rules(value, arguments, schema, json_rule)
            grammar = ArgumentGrammar("part", value, None, json_rule)
            parsed = _schemas_by_name(schema).get(name)
            expression = self._value_rule(grammar, value.schema, schema, parsed)
        return [*grammar.rules, f"value: {expression}", "REST: /(?s:.+)/"]

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        while tag := (yield from stream.until(self.trigger, *self.answer_tags)):
            if tag != self.trigger:
                continue
            if not (yield from self._starts_call(stream)):
                if not stream.has_ended:
                    yield "content", self.trigger
                continue
            while (yield from self._call(stream, schemas)):
                if not self.block[0]:
                    break
                tags = (self.opening.strip(), self.block[1].strip())
                if (yield from stream.next_of(*tags)) != tags[0]:
                    break

    def _starts_call(self, stream: TextStream) -> Steps[bool]:
        """Removes the text between the trigger and the name of a tool. Returns whether it is
        there."""
        texts = (self.opening if self.block[0] else "", self.before_name)
        for text in filter(None, map(str.strip, texts)):
            if not (yield from stream.next_of(text)):
                return False
        return True

    def _call(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[bool]:
        """Parses a call from the tool's name on. Returns whether it is complete."""
        end = self.after_name.strip() or "<"
        name = yield from stream.read_name(end, schemas.keys(), removes=end != "<")
        if name is None:
            return False
        yield "call", name
        schema = schemas.get(name, {})
        nodes = _schemas_by_name(schema)
        start = "{"
        while (tag := (yield from stream.next_of(*self._tags))) == self.before_key:
            key = yield from stream.read_until(self.after_key)
            if key is None:
                return False
            yield "arguments", f"{start}{json.dumps(key, ensure_ascii=False)}: "
            start = ", "
            node = nodes.get(key)
            is_raw, has_null = is_text(schema, node), False
            if not self.kinds[0]:
                has_null = allows_type(schema, node, "null")
            else:
                kind = yield from stream.next_of(*self.kinds)
                if not kind:
                    return False
                is_raw = kind == self.kinds[0]
            if not (yield from self._value(stream, is_raw, has_null)):
                return False
        if not tag:
            return False
        yield "arguments", "{}" if start == "{" else "}"
        yield "end", ""
        return True

    @property
    def _tags(self) -> tuple[str, str]:
        """What stands before an argument, or after the last one."""
        return self.before_key, self.closing

    def _value(self, stream: TextStream, is_text: bool, has_null: bool) -> Steps[bool]:
        """Parses a value and the text behind it. Returns whether it is complete. `has_null`:
        whether a string may be null instead."""
        closing = self.after_value.rstrip()
        if not is_text:
            if (yield from stream.next_of("{", "[", '"', removes=False)):
                if not (yield from stream.json_value()):
                    return False
                return bool((yield from stream.next_of(closing.strip())))
            return bool((yield from stream.until(closing, kind="arguments")))
        if has_null and (yield from stream.starts_with("null" + closing)):
            yield "arguments", "null"
            return True
        return (yield from stream.text_value(closing))

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        texts = [self._rendered(*call, (schemas or {}).get(call[0], {})) for call in calls]
        return self.block[0] + ("" if self.block[0] else "\n").join(texts) + self.block[1]

    def _rendered(self, name: str, arguments: Any, schema: Any) -> str:
        nodes = _schemas_by_name(schema)
        text = self.opening + self.before_name + name + self.after_name
        for key, value in arguments.items():
            is_raw = isinstance(value, str)
            if not self.kinds[0]:
                is_raw = is_raw and is_text(schema, nodes.get(key))
            rendered = value if is_raw else json.dumps(value, ensure_ascii=False)
            kind = self.kinds[0 if is_raw else 1]
            text += self.before_key + key + self.after_key + kind + rendered + self.after_value
        return text + self.closing


def _schemas_by_name(schema: Any) -> dict[str, Any]:
    """The schemas of a tool's arguments, by name."""
    return {argument.name: argument.schema for argument in arguments_of(schema)[0]}
