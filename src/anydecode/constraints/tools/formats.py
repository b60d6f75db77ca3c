"""The tool-call formats of model families: how calls are written, constrained and parsed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.json.narrowed_value import json_value_rules
from anydecode.constraints.tools.stream import Steps, TextStream

_SPACE = r"/[ \n]?/"
#: A call: the name of its tool and the value of its arguments.
Call = tuple[str, Any]
#: The tools whose arguments may match a grammar without being valid, with what it leaves out.
Inexact = Mapping[str, "list[str] | None"]
#: Returns the `%json` directive of a schema, as the mask enforces it.
JsonRule = Callable[[JsonSchema], str]


@dataclass(frozen=True)
class CallRules:
    """Parts of a Lark grammar: `trigger first (separator call)* closing`, with their `rules`. Where
    the trigger may be left out, the first call is `bare`, and begins with one of `starts`.
    `others`: other triggers, each with the one call behind it. `inexact`: the tools whose arguments
    may match the grammar without being valid, with the keywords that the grammar leaves out, as
    "keyword at #/path"; None if those are the ones that the mask of the schema leaves out."""

    first: str
    call: str
    rules: Sequence[str]
    separator: str = ""
    closing: str = ""
    bare: str = ""
    starts: Sequence[str] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    inexact: Inexact = field(default_factory=dict)


@dataclass(frozen=True)
class ToolFormat(ABC):
    """How a model family writes tool calls.

    Attributes:
        markers: Texts that the chat templates of the family contain, all of them.
        reasoning_opening: The text that starts the reasoning, in a format in which all parts of an
            answer are on channels; else empty.
        answer_opening: In such a format, the text that starts the answer behind the reasoning, in
            two parts: other texts may start with the first one.
        answer_tags: The texts around an answer that is neither reasoning nor a call; they are
            removed.
        text_start: The text behind the trigger with which a text begins in place of calls.
        text_openings: In such a format, the texts that start a part that is neither reasoning nor a
            call.
    """

    markers: tuple[str, ...] = field(default=(), kw_only=True)
    reasoning_opening: str = field(default="", kw_only=True)
    answer_opening: tuple[str, str] = field(default=("", ""), kw_only=True)
    answer_tags: tuple[str, ...] = field(default=(), kw_only=True)
    text_openings: tuple[str, ...] = field(default=(), kw_only=True)
    text_start: str = field(default="", kw_only=True)
    #: A text behind which `parse` knows that the name of a tool is complete.
    name_end: ClassVar[str] = "{"

    @property
    @abstractmethod
    def trigger(self) -> str:
        """The text that starts calls behind other text."""

    @property
    def start_trigger(self) -> str:
        """A text that starts calls if the answer begins with it; may be empty."""
        return ""

    @property
    def string_end(self) -> str:
        """The text behind a string that is written as it is; empty if there are none."""
        return ""

    @abstractmethod
    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        """The grammar of calls of the tools with these schemas, by name."""

    def value_rules(
        self, value: JsonSchema, arguments: str, schema: Any, json_rule: JsonRule
    ) -> list[str]:
        """The rules of `NarrowedValue` for a value in the arguments of a call.

        Args:
            value: The schema of the value.
            arguments: The arguments before the value, as JSON; empty if the value is all of them.
            schema: The schema of the tool's arguments.
            json_rule: Returns the rule of a schema.
        """
        return json_value_rules(json_rule(value), is_whole=not arguments)

    @abstractmethod
    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        """Parses an answer. `schemas`: the schemas of the tools' arguments, by name."""

    def parse_text(self, stream: TextStream) -> Steps[None]:
        """Parses an answer to a request without tools, in which a call is text."""
        while (yield from stream.until(*self.answer_tags)):
            pass

    @abstractmethod
    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        """The text of `calls`. `schemas`: the schemas of their arguments, by name."""


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """Calls as JSON objects with a name and arguments.

    Attributes:
        opening: The text before a call, or before a list of calls.
        closing: The text after it; may be empty.
        key: The key of the arguments.
        is_list: Whether the calls are a JSON list. One call without the brackets is parsed too.
        is_optional: Whether `opening` and `closing` may be left out, `opening` at the start of the
            answer only. They then stand around all calls.
        separator: The text between calls that have no list and no closing text of their own.
        name_key: The key of the name.
        id_key: The key of the number of a call; empty if there is none.
        layout: The white space behind the bracket of a list, behind its commas, and before the
            other bracket.
        object_layout: The white space behind the brace of a call, behind its comma, and before the
            other brace.
        is_single: Whether an answer has at most one call.
    """

    opening: str
    closing: str = ""
    key: str = "arguments"
    is_list: bool = False
    is_optional: bool = False
    separator: str = ""
    name_key: str = "name"
    id_key: str = ""
    layout: tuple[str, str, str] = ("", " ", "")
    object_layout: tuple[str, str, str] = ("", " ", "")
    is_single: bool = False

    @property
    def trigger(self) -> str:
        return self.opening

    @property
    def start_trigger(self) -> str:
        return ("[" if self.is_list else '{"name"') if self.is_optional else ""

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        rules, options = [], []
        for number, (name, schema) in enumerate(schemas.items()):
            begin, between, end = self.object_layout
            prefix = begin + json.dumps({self.name_key: name})[1:-1] + f',{between}"{self.key}": '
            options.append(f"{literal(prefix)} arguments_{number} {literal(end + '}')}")
            rules.append(f"arguments_{number}: {json_rule(schema)}")
        id_rule = f'{literal(f"{{{json.dumps(self.id_key)}: ")} /"[0-9]{{1,4}}", /'
        start = id_rule if self.id_key else '"{"'
        rules.append(f"object: {start} ({' | '.join(options)})")
        inexact = inexact_tools(schemas)
        closing = literal(self.closing)
        if self.is_list:
            begin, between, end = self.layout
            first = f"{_SPACE} {literal('[' + begin)} object"
            closing = f"{literal(end + ']')} {_SPACE if closing else ''} {closing}"
            bare = f"{literal('[' + begin)} object"
            separator = literal("," + between)
            return CallRules(first, "object", rules, separator, closing, bare, inexact=inexact)
        first = f"{_SPACE} object"
        if closing and not self.is_optional:
            first = f"{first} {_SPACE} {closing}"
            call = f"{literal(self.opening)} {first}"
            return CallRules(first, call, rules, "/\\n?/", inexact=inexact)
        closing, separator = closing and f"({closing})?", literal(self.separator)
        call = "" if self.is_single else "object"
        return CallRules(first, call, rules, separator, closing, "object", inexact=inexact)

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        if self.is_optional and (yield from stream.next_of(self.start_trigger[0], removes=False)):
            yield from self._calls(stream, "")
        while tag := (yield from stream.until(self.opening, *self.answer_tags)):
            if tag == self.opening:
                yield from self._calls(stream, tag)

    def _calls(self, stream: TextStream, tag: str) -> Steps[None]:
        """Parses the calls behind an opening text `tag`, which is content if there are none. Of a
        call that is cut before its arguments, the name is kept if it is complete."""
        is_open = bool(tag)
        is_list = self.is_list and bool((yield from stream.next_of("[")))
        if is_list:
            tag += "["
        elif self.is_list and not (yield from stream.next_of("{", removes=False)):
            if not stream.has_ended:
                yield "content", tag
            return
        elif self.is_optional and self.closing:
            tag += yield from stream.next_of(self.closing)
        separator = "," if is_list else self.separator.strip()
        while True:
            is_complete = yield from stream.json_call()
            if not is_complete:
                if is_complete is False and tag:
                    yield "content", tag
                elif is_complete is None and is_open:
                    yield from stream.cut_call()
                return
            tag, is_open = "", True
            if self.closing and not is_list:
                yield from stream.next_of(self.closing)
            yield "end", ""
            if separator and (yield from stream.next_of(separator)):
                continue
            if self.is_optional and (yield from stream.next_of("{", removes=False)):
                continue
            if is_list and (yield from stream.next_of("]")) and self.closing:
                yield from stream.next_of(self.closing)
            return

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        texts = []
        for number, (name, arguments) in enumerate(calls[:1] if self.is_single else calls):
            call = {self.id_key: str(number)} if self.id_key else {}
            call |= {self.name_key: name, self.key: arguments}
            texts.append(self._rendered(call))
        if self.is_list:
            begin, between, end = self.layout
            return f"{self.opening}[{begin}{f',{between}'.join(texts)}{end}]{self.closing}"
        if self.closing and not self.is_optional:
            return "\n".join(f"{self.opening}\n{text}\n{self.closing}" for text in texts)
        return self.opening + self.separator.join(texts) + self.closing

    def _rendered(self, call: Mapping[str, Any]) -> str:
        begin, between, end = self.object_layout
        members = (
            f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in call.items()
        )
        return "{" + begin + f",{between}".join(members) + end + "}"


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """Calls as a name and arguments in JSON, between texts.

    Attributes:
        before: The text before a name.
        between: The text between a name and its arguments.
        after: The text after the arguments.
        opening: The text before all calls.
        closing: The text after all calls.
        separator: The text between calls.
        is_numbered: Whether names end with a colon and the number of the call.
        id_end: The text between the id of a call, which is then before its name, and the name;
            empty if there are no ids.
    """

    before: str
    between: str
    after: str = ""
    opening: str = ""
    closing: str = ""
    separator: str = ""
    is_numbered: bool = False
    id_end: str = ""

    @property
    def trigger(self) -> str:
        return self.opening or self.before

    def rules(self, schemas: Mapping[str, JsonSchema], json_rule: JsonRule) -> CallRules:
        rules, options = [], []
        for number, (name, schema) in enumerate(schemas.items()):
            suffix = '":" /[0-9]{1,4}/ ' if self.is_numbered else ""
            options.append(
                f"{literal(name)} {suffix}{literal(self.between)}"
                f" arguments_{number} {literal(self.after)}"
            )
            rules.append(f"arguments_{number}: {json_rule(schema)}")
        rules.append("named: " + " | ".join(options))
        id_rule = f"/[A-Za-z0-9_-]{{1,64}}/ {literal(self.id_end)} " if self.id_end else ""
        call = f"{literal(self.before)} {id_rule}named"
        first = call if self.opening else "named"
        return CallRules(
            first,
            call,
            rules,
            literal(self.separator),
            literal(self.closing),
            inexact=inexact_tools(schemas),
        )

    def parse(self, stream: TextStream, schemas: Mapping[str, Any]) -> Steps[None]:
        while tag := (yield from stream.until(self.trigger, *self.answer_tags)):
            if tag != self.trigger:
                continue
            if self.opening and not (yield from stream.next_of(self.before)):
                if not stream.has_ended:
                    yield "content", self.opening
                continue
            while (yield from self._call(stream, schemas.keys())):
                if not self.opening:
                    break
                if self.separator.strip():
                    yield from stream.next_of(self.separator.strip())
                tags = filter(None, (self.before, self.closing))
                if (yield from stream.next_of(*tags)) != self.before:
                    break

    def _call(self, stream: TextStream, names: Set[str]) -> Steps[bool]:
        """Parses a call from its name on. Returns whether it is complete."""
        name = yield from stream.read_name(self.between, names, self._tool)
        if name is None:
            return False
        yield "call", name
        if not (yield from stream.json_value()):
            return False
        if self.after:
            yield from stream.next_of(self.after.strip())
        yield "end", ""
        return True

    def _tool(self, name: str) -> str:
        if self.id_end:
            name = name.partition(self.id_end)[2]
        name = name.partition("[CALL_ID]")[0].strip()
        return name.rpartition(":")[0] if self.is_numbered and ":" in name else name

    def render(self, calls: Sequence[Call], schemas: Mapping[str, Any] | None = None) -> str:
        texts = []
        for number, (name, arguments) in enumerate(calls):
            suffix = f":{number}" if self.is_numbered else ""
            prefix = f"{number}{self.id_end}" if self.id_end else ""
            text = json.dumps(arguments, ensure_ascii=False)
            texts.append(f"{self.before}{prefix}{name}{suffix}{self.between}{text}{self.after}")
        return self.opening + self.separator.join(texts) + self.closing


def inexact_tools(schemas: Mapping[str, JsonSchema]) -> Inexact:
    """The tools whose arguments may match the mask of their schema without being valid."""
    return {name: None for name, schema in schemas.items() if schema.needs_validation}


def literal(text: str) -> str:
    """`text` as a string of a Lark grammar; nothing if it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex_literal(text: str) -> str:
    """`text` in a regular expression of a grammar."""
    return "".join(
        letter if letter.isalnum() and letter.isascii() else f"\\u{{{ord(letter):x}}}"
        for letter in text
    )
