"""Grammars of arguments that are not written as JSON, made from the schemas of the tools.

A grammar allows every valid value in the order of the schema's properties, or more: what it cannot
express is left to the validation of the whole call.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.json.relaxing import is_pattern, subschemas
from anydecode.constraints.json.termination import resolve_reference
from anydecode.constraints.tools.formats import JsonRule, literal, regex_literal
from anydecode.constraints.tools.stream import Steps, TextStream, json_text
from anydecode.errors import ConstraintError

#: Maximum number of references followed in a row.
_MAX_REFERENCES = 16
#: Maximum number of lists and objects around a value.
_MAX_DEPTH = 100
#: Maximum number of items that a rule counts.
_MAX_COUNT = 100
_ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties",
    }
)  # fmt: skip
_KEYWORDS = {
    "object": {"properties", "required"},
    "array": {"prefixItems", "items", "additionalItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_KEYWORDS["number"] = _KEYWORDS["integer"]
#: Fixed white space.
JSON_STYLE: dict[str, Any] = {"whitespace": None}
#: Patterns of formats for strings without quotes, which allow all valid strings and few others.
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+)?"
_TIME += "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "email": "[^@\\s<>]+@[^@\\s<>]+",
    "ipv4": "[0-9]{1,3}(\\.[0-9]{1,3}){3}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
_WORD_END = re.compile(r"[,\]})]")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


class ValueSyntax(ABC):
    """How values are written. `words` are those for true, false and null."""

    words: tuple[str, str, str]
    separator: str

    @property
    def string_end(self) -> str:
        """The text behind a string that is written as it is; empty if there are none."""
        return ""

    @abstractmethod
    def key(self, name: str) -> str:
        """The text of a property's name, up to its value."""

    @property
    @abstractmethod
    def any_key(self) -> str:
        """An expression of the text of any property's name."""

    @abstractmethod
    def text(self, value: str) -> str:
        """The text of a string."""

    @abstractmethod
    def string(self, node: dict[str, Any], grammar: ArgumentGrammar) -> str:
        """An expression of the strings under the schema `node`, whose rules are added to
        `grammar`."""

    @abstractmethod
    def parse_key(self, stream: TextStream) -> Steps[str | None]:
        """Returns a property's name, which is removed with the text behind it; None if the text
        ended or has no name."""

    @abstractmethod
    def parse_string(self, stream: TextStream) -> Steps[bool | None]:
        """Yields a string as JSON. Returns whether it is complete; None if there is no string."""

    def parse(self, stream: TextStream, depth: int = 0) -> Steps[bool]:
        """Yields a value as JSON, in events of kind "arguments". Returns whether it is complete: a
        value within more than `_MAX_DEPTH` others, `depth` counts them, is not."""
        is_string = yield from self.parse_string(stream)
        if is_string is not None:
            return is_string
        if depth > _MAX_DEPTH:
            return False
        bracket = yield from stream.next_of("[", "{")
        if not bracket:
            return (yield from self._parse_word(stream))
        yield "arguments", bracket
        closing, start = "]" if bracket == "[" else "}", ""
        while not (yield from stream.next_of(closing)):
            key = ""
            if bracket == "{":
                name = yield from self.parse_key(stream)
                if name is None:
                    return False
                key = json_text(name) + ": "
            yield "arguments", start + key
            start = ", "
            if not (yield from self.parse(stream, depth + 1)):
                return False
            yield from stream.next_of(self.separator.strip())
        yield "arguments", closing
        return True

    def _parse_word(self, stream: TextStream) -> Steps[bool]:
        """Yields a number or one of `words` as JSON."""
        while not (end := _WORD_END.search(stream.buffer)):
            if stream.is_final:
                stream.take(len(stream.buffer))
                return False
            yield None
        word = stream.take(end.start()).strip()
        yield (
            "arguments",
            dict(zip(self.words, ("true", "false", "null"), strict=True)).get(word, word),
        )
        return bool(word)

    def render(self, value: Any) -> str:
        """The text of a value."""
        if value is None or isinstance(value, bool):
            return self.words[2 if value is None else not value]
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.render, value))}]"
        if isinstance(value, dict):
            members = (self.key(name) + self.render(member) for name, member in value.items())
            return f"{{{self.separator.join(members)}}}"
        return json.dumps(value)


class Argument(NamedTuple):
    """An argument of a tool: its name, its schema, and whether every call has it."""

    name: str
    schema: Any
    is_required: bool


def tool_rules(
    schemas: Mapping[str, JsonSchema],
    arguments: Callable[[str, JsonSchema], tuple[str, ArgumentGrammar]],
    call: Callable[[str, str], str],
) -> tuple[list[str], str, dict[str, list[str] | None]]:
    """The rules of calls of any tool: those of the arguments, an expression of a call, and the
    tools whose arguments may match the grammar without being valid, with the keywords that it
    leaves out.

    Args:
        schemas: The schemas of the tools' arguments, by name.
        arguments: Returns an expression of the arguments under a schema, and the grammar with its
            rules, whose names start with the given prefix.
        call: Returns an expression of a call, from the tool's name and that of its arguments.
    """
    rules: list[str] = []
    options: list[str] = []
    inexact: dict[str, list[str] | None] = {}
    for number, (name, schema) in enumerate(schemas.items()):
        expression, grammar = arguments(f"tool_{number}", schema)
        options.append(call(name, expression))
        rules += grammar.rules
        if grammar.left_out:
            inexact[name] = sorted(grammar.left_out)
    return rules, " | ".join(options), inexact


class ArgumentGrammar:
    """The rules of the arguments of one tool.

    Attributes:
        root: The schema.
        arguments: The arguments, in order.
        rules: The rules of the grammar.
        left_out: What the grammar leaves out of the schema, as "keyword at #/path".
    """

    def __init__(
        self, prefix: str, schema: JsonSchema, syntax: ValueSyntax | None, json_rule: JsonRule
    ) -> None:
        self.root = schema.schema
        self._prefix = prefix
        self._syntax: Any = syntax  # None if values are JSON, or strings as they are
        self._json_rule = json_rule
        self._references: dict[str, str] = {}
        self._has_any = False
        self.rules: list[str] = []
        self._paths: dict[int, str] = {}
        self.left_out = set(schema.left_out)
        self.arguments, is_exact = arguments_of(self.root)
        if not is_exact:
            self._leave_out(self.root)

    def value(self, node: Any) -> str:
        """An expression of the values under the schema `node`."""
        if not isinstance(node, dict):
            if node is False:
                self._leave_out(node)
            return self._any()
        if "$ref" in node:
            self._note(node, {"$ref"})
            return self._reference(node)
        for key in ("const", "enum"):
            if key in node:
                self._note(node, {key, "type"})
                values = [node[key]] if key == "const" else node[key]
                return _options(literal(self._syntax.render(value)) for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            if node.get(key):
                self._note(node, {key} if len(node[key]) == 1 else {"anyOf"})
                parts = node[key][:1] if key == "allOf" else node[key]
                return _options(map(self.value, parts))
        types = node.get("type", _TYPES)
        types = [types] if isinstance(types, str) else list(types)
        if set(types) >= set(_TYPES) - {"integer"}:
            self._note(node, {"type"})
            return self._any()
        known = {"type"}.union(*(_KEYWORDS.get(one, ()) for one in types))
        self._note(node, known)
        return _options(self._of_type(one, node) for one in types)

    def members(self, members: Sequence[tuple[str, bool]]) -> str:
        """An expression of `members` with separators: an expression each, and whether it is
        required."""
        separator = literal(self._syntax.separator)
        after, first = '""', '""'
        for expression, is_required in reversed(members):
            begins = f"{expression} {after}"
            first = self._rule(begins if is_required else f"{begins} | {first}")
            rest = f"{separator} {expression}"
            after = self._rule(f"{rest if is_required else f'({rest})?'} {after}")
        return first

    def _of_type(self, type_name: str, node: dict[str, Any]) -> str:
        syntax = self._syntax
        if type_name == "string":
            return syntax.string(node, self)
        if type_name in ("integer", "number"):
            return self.json(type_name, node)
        if type_name == "boolean":
            return f"{literal(syntax.words[0])} | {literal(syntax.words[1])}"
        if type_name == "null":
            return literal(syntax.words[2])
        if type_name == "array":
            return self._array(node)
        return self._object(node)

    def json(self, type_name: str, node: dict[str, Any]) -> str:
        """The rule of the values of a scalar type under the schema `node`, written as JSON."""
        keys = sorted(_KEYWORDS[type_name] & node.keys())
        schema = {"type": type_name, **{key: node[key] for key in keys}}
        scalar = JsonSchema(schema, **JSON_STYLE)
        rule, left_out = self._json(scalar, {"type": type_name})
        if left_out:
            self._leave_out(node)
        return rule

    def part(self, node: Any) -> str:
        """The rule of the values under the schema `node`, a part of the schema of all arguments,
        written as JSON."""
        part = JsonSchema(self._with_references(node), **JSON_STYLE)
        rule, left_out = self._json(part, {})
        root, path = f"#/$defs/{_ROOT}", self._path(node)
        for entry in left_out:
            keyword, _, where = entry.partition(" at ")
            is_defined = where == root or where.startswith(f"{root}/")
            where = f"#{where[len(root) :]}" if is_defined else path + where[1:]
            self.left_out.add(f"{keyword} at {where}")
        return rule

    def _json(self, schema: JsonSchema, loose: dict[str, Any]) -> tuple[str, list[str]]:
        """The rule of the values under `schema`, written as JSON, and what it leaves out; if it
        cannot be enforced, the rule of those under the schema `loose`."""
        try:
            return self._rule(self._json_rule(schema)), schema.left_out
        except ConstraintError:
            rule = self._rule(self._json_rule(JsonSchema(loose, **JSON_STYLE)))
            return rule, ["schema at #"]

    def _with_references(self, node: Any) -> Any:
        """The schema `node`, a part of the schema of all arguments, in which its references
        resolve."""
        if not isinstance(node, dict) or '"$ref"' not in json.dumps(node):
            return node
        root = _rerooted(self.root)
        kept = {key: root.pop(key) for key in ("$schema",) if key in root}
        root.pop("$id", None)
        return {**kept, **_rerooted(node), "$defs": {_ROOT: root}}

    def any_text(self, node: Any, closing: str) -> str:
        """An expression of any string, written as it is, and the text `closing` behind it, in place
        of the strings under the schema `node`, which allows other values too."""
        self._leave_out(node)
        return self.raw_string({}, closing)

    def raw_text(self, node: Any, closing: str, *, has_null: bool = True) -> str:
        """An expression of the values under the schema `node`, which allows strings and null only,
        written as they are, and the text `closing` behind them. Without null unless it
        `has_null`."""
        for _ in range(_MAX_REFERENCES):
            if isinstance(node, dict) and "$ref" in node:
                self._note(node, {"$ref"})
                node = resolve_reference(self.root, str(node["$ref"]))
        if not isinstance(node, dict):
            return self.raw_string({}, closing)
        if "const" in node or "enum" in node:
            self._note(node, {"const", "enum", "type"})
            values = node["enum"] if "enum" in node else [node["const"]]
            return _options(
                literal(("null" if value is None else value) + closing)
                for value in values
                if isinstance(value, str) or (value is None and has_null)
            )
        for key in ("anyOf", "oneOf", "allOf"):
            if node.get(key):
                self._note(node, {key} if len(node[key]) == 1 else {"anyOf"})
                parts = node[key][:1] if key == "allOf" else node[key]
                texts = [self.raw_text(part, closing, has_null=has_null) for part in parts]
                return _options(filter(None, texts))
        types = node.get("type", "string")
        self._note(node, {"type", *_KEYWORDS["string"]})
        options = [literal("null" + closing)] if "null" in types and has_null else []
        return _options([*options, *([self.raw_string(node, closing)] * ("string" in types))])

    def raw_string(self, node: dict[str, Any], closing: str) -> str:
        """The rule of the strings under the schema `node`, written as they are, and the text
        `closing` behind them."""
        pattern = node.get("pattern")
        min_length, max_length = node.get("minLength", 0), node.get("maxLength")
        has_bounds = bool(min_length) or max_length is not None
        body = "(?s:.*)"
        if isinstance(pattern, str):
            is_regular = is_pattern(pattern) and "/" not in pattern and "\n" not in pattern
            if not is_regular or has_bounds:
                self._leave_out(node)
            if is_regular:
                has_end = pattern.endswith("$") and not pattern.endswith("\\$")
                body = pattern[pattern.startswith("^") : len(pattern) - has_end]
                body = "(?s:.*)" * (not pattern.startswith("^")) + f"({body})"
                body += "(?s:.*)" * (not has_end)
        elif node.get("format") in _FORMATS:
            body = _FORMATS[node["format"]]
        elif has_bounds:
            body = f"(?s:.{{{min_length},{'' if max_length is None else max_length}}})"
        if "format" in node:
            self._leave_out(node)
        terminal = f"{self._prefix.upper()}_{len(self.rules)}"
        self.rules.append(f"{terminal}: /{body}/ & ~/(?s:.*){regex_literal(closing)}(?s:.*)/")
        # Lazy: the string ends at the first closing text.
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {terminal} {literal(closing)}")
        return name

    def _array(self, node: dict[str, Any]) -> str:
        first, more = node.get("prefixItems", []), node.get("items", True)
        if isinstance(more, list):  # before draft 2020-12
            first, more = more, node.get("additionalItems", True)
        first = first or [more]
        min_items, max_items = node.get("minItems", 0), node.get("maxItems")
        if not isinstance(min_items, int) or min_items > _MAX_COUNT:
            min_items = 1
            self._leave_out(node)
        if max_items is not None and (
            not isinstance(max_items, int) or max_items > _MAX_COUNT or max_items < min_items
        ):
            max_items = None
            self._leave_out(node)
        if more is False:
            max_items = min(len(first), len(first) if max_items is None else max_items)
        first = first[:max_items]
        if not first or first[0] is False:
            return '"[]"'
        separator, count, items = literal(self._syntax.separator), len(first), ""
        if max_items is None or max_items > count:
            end = "" if max_items is None else max_items - count
            item = self._rule(self.value(more))
            items = f"({separator} {item}){{{max(min_items - count, 0)},{end}}}"
        for index, part in reversed(list(enumerate(first))):
            items = f"{separator if index else ''} {self._rule(self.value(part))} {items}"
            items = self._rule(items) if index < min_items else f"({items})?"
        return f'"[" {items} "]"'

    def _object(self, node: dict[str, Any]) -> str:
        properties = node.get("properties")
        if not properties:
            if node.get("required") or isinstance(node.get("additionalProperties"), dict):
                self._leave_out(node)
            if node.get("additionalProperties") is False and not node.get("required"):
                return '"{}"'
            member = f"{self._syntax.any_key} {self._any()}"
            return self._rule(
                f'"{{" ({member} ({literal(self._syntax.separator)} {member})*)? "}}"'
            )
        required = set(node.get("required", ()))
        if not required <= properties.keys():
            self._leave_out(node)
        members = [
            (f"{literal(self._syntax.key(name))} {self._rule(self.value(value))}", name in required)
            for name, value in properties.items()
        ]
        return f'"{{" {self.members(members)} "}}"'

    def _reference(self, node: dict[str, Any]) -> str:
        reference = str(node["$ref"])
        if reference not in self._references:
            name = f"{self._prefix}_ref_{len(self._references)}"
            self._references[reference] = name
            target = resolve_reference(self.root, reference)
            if target is None:
                self._leave_out(node)
            self.rules.append(f"{name}: {self.value(target)}")
        return self._references[reference]

    def _any(self) -> str:
        """The rule of any value."""
        name = f"{self._prefix}_any"
        if not self._has_any:
            self._has_any = True
            syntax, separator = self._syntax, literal(self._syntax.separator)
            string, number = syntax.string({}, self), self.json("number", {})
            words = " | ".join(map(literal, syntax.words))
            member = f"{syntax.any_key} {name}"
            self.rules.append(
                f'{name}: {string} | {number} | {words} | "[" ({name} ({separator} {name})*)? "]"'
                f' | "{{" ({member} ({separator} {member})*)? "}}"'
            )
        return name

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _note(self, node: dict[str, Any], known: set[str]) -> None:
        """Records whether all keywords of `node` are expressed."""
        if node.keys() - _ANNOTATIONS - known:
            self._leave_out(node)

    def _leave_out(self, node: Any) -> None:
        """Records that the grammar does not express all of the schema `node`."""
        self.left_out.add(f"schema at {self._path(node)}")

    def _path(self, node: Any) -> str:
        """The JSON pointer of the schema `node`; of the whole schema, if it is no part of it."""
        if not self._paths:
            self._paths = {id(part): path for path, part in subschemas(self.root)}
        return self._paths.get(id(node), "#")


def arguments_of(schema: Any) -> tuple[list[Argument], bool]:
    """The arguments of a tool, and whether nothing else restricts them."""
    found: dict[str, Any] = {}
    required: set[str] = set()
    is_exact = _collect(schema, schema, True, found, required, 0)
    arguments = [Argument(name, value, name in required) for name, value in found.items()]
    return arguments, is_exact


def open_argument(arguments: str) -> str | None:
    """The name of the argument whose value follows the start of arguments as JSON; None if a value
    within it follows."""
    try:
        names = list(json.loads(arguments + "null}"))
    except ValueError:
        return None
    return names[-1]


def _collect(
    root: Any, node: Any, applies: bool, found: dict[str, Any], required: set[str], depth: int
) -> bool:
    """Adds the properties of a subschema to `found`, and those that every call has to `required`
    if the subschema `applies` to every call. Returns whether it consists of properties only."""
    if not isinstance(node, dict) or depth > _MAX_REFERENCES:
        return False
    is_exact = not node.keys() - _ANNOTATIONS - {"type", "properties", "required", "$ref"}
    if "$ref" in node:
        target = resolve_reference(root, str(node["$ref"]))
        is_exact = _collect(root, target, applies, found, required, depth + 1) and is_exact
    properties = node.get("properties")
    for name, value in properties.items() if isinstance(properties, dict) else ():
        if name in found and found[name] != value:
            value, is_exact = {"anyOf": [found[name], value]}, False
        found[name] = value
    if applies:
        names = [name for name in node.get("required", ()) if isinstance(name, str)]
        required.update(names)
        for name in names:
            found.setdefault(name, {})
    for key in ("allOf", "anyOf", "oneOf"):
        for part in node.get(key, ()):
            _collect(root, part, applies and key == "allOf", found, required, depth + 1)
    for key in ("then", "else"):
        _collect(root, node.get(key), False, found, required, depth + 1)
    return is_exact


def is_text(root: Any, node: Any, depth: int = 0) -> bool:
    """Whether a schema allows nothing but strings, or strings and null."""
    if not isinstance(node, dict) or depth > _MAX_REFERENCES:
        return False
    types = node.get("type")
    if types is not None:
        return set([types] if isinstance(types, str) else types) <= {"string", "null"}
    if "const" in node or "enum" in node:
        values = node.get("enum", [node.get("const")])
        return all(value is None or isinstance(value, str) for value in values)
    if "$ref" in node:
        return is_text(root, resolve_reference(root, str(node["$ref"])), depth + 1)
    for key in ("anyOf", "oneOf"):
        if node.get(key):
            return all(is_text(root, part, depth + 1) for part in node[key])
    return any(is_text(root, part, depth + 1) for part in node.get("allOf", ()))


def allows_type(root: Any, node: Any, name: str, depth: int = 0) -> bool:
    """Whether a schema may allow values of the type `name`, "string" or "null"."""
    if not isinstance(node, dict) or depth > _MAX_REFERENCES:
        return node is not False
    types = node.get("type")
    if types is not None and name not in ([types] if isinstance(types, str) else types):
        return False
    if "const" in node or "enum" in node:
        values = node.get("enum", [node.get("const")])
        return any(value is None if name == "null" else isinstance(value, str) for value in values)
    if "$ref" in node:
        return allows_type(root, resolve_reference(root, str(node["$ref"])), name, depth + 1)
    for key in ("anyOf", "oneOf"):
        if node.get(key):
            return any(allows_type(root, part, name, depth + 1) for part in node[key])
    return all(allows_type(root, part, name, depth + 1) for part in node.get("allOf", ()))


#: The name of the whole schema among the definitions of a part of it.
_ROOT = "arguments"


def _rerooted(node: Any) -> Any:
    """`node` with the references into the whole schema pointing into its definition `_ROOT`."""
    if isinstance(node, list):
        return [_rerooted(value) for value in node]
    if not isinstance(node, dict):
        return node
    return {
        key: f"#/$defs/{_ROOT}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        else value
        if key in ("enum", "const", "default", "examples")
        else _rerooted(value)
        for key, value in node.items()
    }


def _options(expressions: Iterable[str]) -> str:
    """An expression of one of `expressions`; empty if there are none."""
    text = " | ".join(expressions)
    return f"({text})" if text else ""
