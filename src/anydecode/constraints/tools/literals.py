"""Formats in which calls look like those of a programming language: Python calls of Llama 4 and
LFM2, and Gemma's calls with strings between tokens of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.tools.formats import (
    Call,
    CallRules,
    Inexact,
    JsonRule,
    ToolFormat,
    literal,
)
from anydecode.constraints.tools.stream import Steps, TextStream
from anydecode.constraints.tools.values import ArgumentGrammar, ValueSyntax, tool_rules


class PythonSyntax(ValueSyntax):
    """Python, with strings in double quotes."""

    words = ("True", "False", "None")
    separator = ", "
    any_key = '%json {"type": "string"} ": "'

    def key(self, name: str) -> str:
        return self.text(name) + ": "

    def text(self, value: str) -> str:
        return json.dumps(value, ensure_ascii=False)

    def string(self, node: dict[str, Any], grammar: ArgumentGrammar) -> str:
        return grammar.json("string", node)

    def parse_key(self, stream: TextStream) -> Steps[str | None]:
        text = ""
        yield from stream.next_of('"', removes=False)
        steps = stream.json_value()
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                is_complete = bool(end.value)
                break
            if event is None:
                yield None
            else:
                text += event[1]
        if not is_complete:
            return None
        yield from stream.next_of(":")
        try:
            name = json.loads(text, strict=False)
        except (ValueError, RecursionError):  # it is no string
            return None
        return name if isinstance(name, str) else None

    def parse_string(self, stream: TextStream) -> Steps[bool | None]:
        if not (yield from stream.next_of('"', removes=False)):
            return None
        stream.take(stream.buffer.index('"'))  # white space behind a key
        return (yield from stream.json_value())


@dataclass(frozen=True)
class EscapeSyntax(ValueSyntax):
    """Gemma's: strings between two tokens `quote`, and names without quotes."""

    quote: str

    @property
    def string_end(self) -> str:
        return self.quote

    words = ("true", "false", "null")
    separator = ","
    any_key = '/[^:{}<>,]+/ ":"'

    def key(self, name: str) -> str:
        return name + ":"

    def text(self, value: str) -> str:
        return f"{self.quote}{value}{self.quote}"

    def string(self, node: dict[str, Any], grammar: ArgumentGrammar) -> str:
        return f"({literal(self.quote)} {grammar.raw_string(node, self.quote)})"

    def parse_key(self, stream: TextStream) -> Steps[str | None]:
        return (yield from stream.read_until(":"))

    def parse_string(self, stream: TextStream) -> Steps[bool | None]:
        if not (yield from stream.starts_with(self.quote)):
            return None
        return (yield from stream.text_value(self.quote))


@dataclass(frozen=True)
class LiteralCalls(ToolFormat):
    """Calls that look like those of a programming language."""

    syntax: ValueSyntax
    opening: str
    closing: str
    #: The text between the name of a tool and its arguments that is parsed with the arguments.
    _start_of_members: ClassVar[str] = ""

    @property
    def trigger(self) -> str:
        return self.opening

    @property
    def string_end(self) -> str:
        return self.syntax.string_end

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        arguments = partial(self._members, json_rule)
        rules, calls, inexact = tool_rules(schemas, arguments, self._call_rule)
        return self._call_rules([*rules, f"written: {calls}"], inexact)

    def _members(
        self, json_rule: JsonRule, prefix: str, schema: JsonSchema
    ) -> tuple[str, ArgumentGrammar]:
        """An expression of the arguments, and the grammar with its rules."""
        grammar = ArgumentGrammar(prefix, schema, self.syntax, json_rule)
        members = [
            (f"{literal(self._name(argument.name))} ({grammar.value(argument.schema)})",
             argument.is_required)
            for argument in grammar.arguments
        ]  # fmt: skip
        return grammar.members(members), grammar

    def value_rules(
        self, value: JsonSchema, arguments: str, schema: Any, json_rule: JsonRule
    ) -> list[str]:
        if not arguments:
            members, grammar = self._members(json_rule, "part", value)
            rest, start = "(?s:.+)", self._start_of_members
            return [*grammar.rules, f"value: {start} {members}", f"REST: /{rest}/"]
        grammar = ArgumentGrammar("part", value, self.syntax, json_rule)
        expression = grammar.value(value.schema)
        # Behind a separator, parsers read white space with the value.
        return [*grammar.rules, f"value: / ?/ ({expression})", r"REST: /[\]}),](?s:.*)/"]

    def _name(self, name: str) -> str:
        """The text of an argument's name."""
        return self.syntax.key(name)

    def _call_rule(self, name: str, members: str) -> str:
        """An expression of a call of the tool `name`."""
        raise NotImplementedError

    def _call_rules(self, rules: Sequence[str], inexact: Inexact) -> CallRules:
        """The grammar of calls, which are the rule `written`."""
        raise NotImplementedError


@dataclass(frozen=True)
class PythonicCalls(LiteralCalls):
    """A list of Python calls, between two tokens that may be left out at the start."""

    @property
    def start_trigger(self) -> str:
        return "["

    def _name(self, name: str) -> str:
        return name + "="

    def _call_rule(self, name: str, members: str) -> str:
        return f'{literal(name + "(")} {members} ")"'

    def _call_rules(self, rules: Sequence[str], inexact: Inexact) -> CallRules:
        closing = f'"]" ({literal(self.closing)})?'
        first = '"[" written'
        return CallRules(first, "written", rules, '", "', closing, first, inexact=inexact)

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        if (yield from stream.next_of("[")):
            yield from self._calls(stream, schemas)
        while (yield from stream.until(self.opening)):
            yield from stream.next_of("[")
            yield from self._calls(stream, schemas)

    def _calls(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        separator = ","
        while separator == ",":
            name = yield from stream.read_name("(", schemas.keys())
            if name is None:
                return
            yield "call", name
            start = "{"
            while not (yield from stream.next_of(")")):
                key = yield from stream.read_until("=")
                if key is None:
                    return
                yield "arguments", f"{start}{json.dumps(key.strip())}: "
                start = ", "
                if not (yield from self.syntax.parse(stream)):
                    return
                yield from stream.next_of(",")
            yield "arguments", "{}" if start == "{" else "}"
            yield "end", ""
            separator = yield from stream.next_of(",", "]")
        yield from stream.next_of(self.closing)

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        texts = []
        for name, arguments in calls:
            members = [f"{key}={self.syntax.render(value)}" for key, value in arguments.items()]
            texts.append(f"{name}({', '.join(members)})")
        return f"{self.opening}[{', '.join(texts)}]{self.closing}"


@dataclass(frozen=True)
class EscapedCalls(LiteralCalls):
    """Gemma's calls: a name and arguments in braces, between two tokens."""

    _start_of_members = '"{"'

    def _call_rule(self, name: str, members: str) -> str:
        return f'{literal(f"call:{name}{{")} {members} "}}"'

    def _call_rules(self, rules: Sequence[str], inexact: Inexact) -> CallRules:
        first = f"written {literal(self.closing)}"
        return CallRules(first, f"{literal(self.opening)} {first}", rules, inexact=inexact)

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        while tag := (yield from stream.until(self.opening)):
            if not (yield from stream.next_of("call:")):
                if not stream.has_ended:
                    yield "content", tag
                continue
            name = yield from stream.read_name("{", schemas.keys(), removes=False)
            if name is None:
                return
            yield "call", name
            if not (yield from self.syntax.parse(stream)):
                return
            yield from stream.next_of(self.closing)
            yield "end", ""

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        return "".join(
            f"{self.opening}call:{name}{self.syntax.render(arguments)}{self.closing}"
            for name, arguments in calls
        )
