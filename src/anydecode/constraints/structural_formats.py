"""The formats of structural tags, as a grammar: the tree of objects that XGrammar defines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.languages import Grammar, Regex
from anydecode.constraints.tools.formats import literal, regex_literal
from anydecode.errors import ConstraintError, one_line

#: Maximum numbers of parts of the path of a format, of characters of limited text, and of repeats.
_MAX_DEPTH, _MAX_CHARS, _MAX_REPEATS = 32, 10_000, 1000
_SLASH_OR_LINE = re.compile(r"\\[\s\S]|/|\n|\r")


class FormatGrammar:
    """The rules of a Lark grammar of one format.

    Args:
        node: The format: an object with a `type`.
        options: Those of `JsonSchema`.

    Attributes:
        start: The expression of the format.
        rules: Rules that it refers to.
        schemas: The rules that are JSON under a schema, by name, each with its place.

    Raises:
        ConstraintError: The format, or one inside it, is invalid or unknown.
    """

    def __init__(self, node: Any, **options: Any) -> None:
        self.rules: list[str] = []
        self.schemas: dict[str, tuple[JsonSchema, str]] = {}
        self._options = options
        self._num_names = 0
        self.start = self._read(node, "format", ())

    def _read(self, node: Any, path: str, ends: tuple[str, ...] = ()) -> str:
        """The expression of a format, with one of `ends` behind it if there are any. Free text
        takes as much as it can, so that it has to be read with its end."""
        if path.count(".") > _MAX_DEPTH:
            raise ConstraintError("the formats of a structural tag are nested too deeply")
        kind = _fields(node, path).get("type")
        if not isinstance(kind, str) or kind not in _READERS:
            known = ", ".join(_READERS)
            raise ConstraintError(f"{path}.type is {one_line(repr(kind), 80)}; it may be {known}")
        read, fields = _READERS[kind]
        if unknown := sorted(node.keys() - {"type", *fields}):
            raise ConstraintError(f"{path} has the unknown field {one_line(unknown[0], 80)}")
        if kind in _WITH_ENDS:
            return read(self, node, path, ends)
        return f"{read(self, node, path, ())} {_closing(ends)}"

    def _rule(self, kind: str, expression: str, *, is_lazy: bool = False) -> str:
        """The name of a new rule, or, in upper case, of a terminal."""
        self._num_names += 1
        name = f"{kind}_{self._num_names}"
        self.rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {expression}")
        return name

    def _text_until(self, text: str, ends: tuple[str, ...]) -> str:
        """The expression of the text `text`, which may be empty, up to the first of `ends`."""
        if not ends:
            return f"{text}?"
        return self._rule("text", f"{text}? {_closing(ends)}", is_lazy=True)

    def _free_text(self, excluded: Sequence[str], max_chars: int | None = None) -> str:
        """The terminal of text that is not empty and contains none of `excluded`."""
        length = "+" if max_chars is None else f"{{1,{max_chars}}}"
        others = "".join(f" & ~/(?s:.*{regex_literal(text)}.*)/" for text in excluded)
        return self._rule("TEXT", f"/(?s:.{length})/{others}")

    def _const(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        return literal(_text(node, "value", path)) or '""'

    def _json(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        if node.get("style", "json") != "json" or node.get("any_order", False) is not False:
            raise ConstraintError(
                f"{path} has a style or any_order; only JSON in order is possible"
            )
        if "json_schema" not in node:
            raise ConstraintError(f"{path}.json_schema is missing")
        name = f"value_{len(self.schemas)}"
        self.schemas[name] = JsonSchema(node["json_schema"], **self._options), path
        return name

    def _regex(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        pattern = _text(node, "pattern", path)
        Regex(pattern).guidance()  # its checks
        return self._rule("PATTERN", f"/{_SLASH_OR_LINE.sub(_escaped, pattern)}/")

    def _grammar(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        text = _text(node, "grammar", path)
        lark = Grammar(text, "gbnf" if "::=" in text else "lark").lark()
        return self._rule("grammar", f"%lark {{\n{lark}\n}}")

    def _any_text(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        if node.get("max_tokens") is not None:
            raise ConstraintError(f"{path}.max_tokens is not possible here; use max_chars")
        excluded = [*ends, *_texts(node, "excludes", path)]
        if node.get("max_chars") is None:
            return self._text_until(self._free_text(excluded), ends)
        limit = _number(node, "max_chars", path, 0, _MAX_CHARS)
        if not limit:
            return _closing(ends) or '""'
        return self._text_until(self._free_text(excluded, limit), ends)

    def _sequence(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        parts = _list(node, "elements", path)
        places = [f"{path}.elements.{index}" for index in range(len(parts))]
        expressions = []
        index = 0
        while index < len(parts):
            part, place, following = parts[index], places[index], parts[index + 1 :]
            index += 1
            if not following:
                expressions.append(self._read(part, place, ends))
            elif not _ends_with_text(part):
                expressions.append(self._read(part, place))
            else:
                end, rest = self._end_of_text(following[0], places[index], place)
                expressions += [self._read(part, place, (end,)), rest]
                index += 1
                if index == len(parts):
                    expressions.append(_closing(ends))
        return " ".join(expressions)

    def _end_of_text(self, node: Any, path: str, text_path: str) -> tuple[str, str]:
        """The text with which the format behind free text begins, and the expression of its rest.
        `text_path`: the path of the free text."""
        kind = _fields(node, path).get("type")
        if kind == "const_string":
            return _text(node, "value", path), ""
        if kind == "tag":
            return self._tag_parts(node, path)
        raise ConstraintError(
            f"{text_path} is free text: it must be the last element, or before a const_string or a"
            " tag"
        )

    def _or(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        parts = enumerate(_list(node, "elements", path))
        options = [self._read(part, f"{path}.elements.{index}", ends) for index, part in parts]
        return f"({' | '.join(options)})"

    def _repeated(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        content, inner = node.get("content"), f"{path}.content"
        if _ends_with_text(content):
            raise ConstraintError(f"{inner} is free text, which cannot be repeated or left out")
        expression = self._read(content, inner)
        signs = {"optional": "?", "star": "*", "plus": "+"}
        if node["type"] in signs:
            return f"({expression}){signs[node['type']]}"
        low = _number(node, "min", path, 0, _MAX_REPEATS)
        high = _number(node, "max", path, -1, _MAX_REPEATS)
        if 0 <= high < low:
            raise ConstraintError(f"{path}.max is {high}, less than min, {low}")
        return f"({expression}){{{low},{'' if high < 0 else high}}}"

    def _tag(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        begin, rest = self._tag_parts(node, path)
        return f"{literal(begin)} {rest}"

    def _tag_parts(self, node: Any, path: str) -> tuple[str, str]:
        """The text that begins a tag, and the rule of its content and end."""
        if _fields(node, path).get("type") != "tag" or node.keys() - {"type", *_READERS["tag"][1]}:
            raise ConstraintError(f"{path} must be a tag: type, begin, content and end")
        begin = _text(node, "begin", path)
        ends = (node["end"],) if isinstance(node.get("end"), str) else node.get("end")
        if not isinstance(ends, list | tuple) or not all(isinstance(one, str) for one in ends):
            raise ConstraintError(f"{path}.end must be a string or a list of strings")
        if "" in ends:  # the end may be left out
            closing = _closing(tuple(filter(None, ends)))
            content = self._read(node.get("content"), f"{path}.content")
            return begin, self._rule("rest", f"{content} {closing}{'?' if closing else ''}")
        content = self._read(node.get("content"), f"{path}.content", tuple(ends))
        return begin, self._rule("rest", content)

    def _tags(self, node: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
        """The parts of all tags of a format."""
        tags = enumerate(_list(node, "tags", path))
        return [self._tag_parts(tag, f"{path}.tags.{index}") for index, tag in tags]

    def _triggered(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        triggers = _texts(node, "triggers", path)
        if not triggers or not all(triggers):
            raise ConstraintError(f"{path}.triggers must be texts that are not empty")
        starts: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        at_least_one, stop_after_first = _flags(node, path)
        tags = self._tags(node, path)
        for begin, rest in tags:
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise ConstraintError(
                    f"no trigger starts the tag {one_line(repr(begin), 80)}; the triggers are"
                    f" {one_line(', '.join(map(repr, triggers)))}"
                )
            trigger = max(found, key=len)
            starts[trigger].append(f"{literal(begin[len(trigger) :])} {rest}")
        first = " | ".join(f"{literal(begin)} {rest}" for begin, rest in tags)
        if at_least_one and stop_after_first:
            return f"({first}) {_closing(ends)}"
        text = self._free_text([*triggers, *ends, *_texts(node, "excludes", path)])
        others = " | ".join(
            f"{self._text_until(text, (trigger,))} ({' | '.join(options)})"
            for trigger, options in starts.items()
            if options
        )
        last = self._text_until(text, ends)
        if stop_after_first:
            return f"(({others}) {_closing(ends)} | {last})"
        return (f"({first}) " if at_least_one else "") + f"({others})* {last}"

    def _separated(self, node: Mapping[str, Any], path: str, ends: tuple[str, ...]) -> str:
        at_least_one, stop_after_first = _flags(node, path)
        tags = self._tags(node, path)
        name = self._rule("tag", " | ".join(f"{literal(begin)} {rest}" for begin, rest in tags))
        separator = literal(_text(node, "separator", path))
        expression = name if stop_after_first else f"{name} ({separator} {name})*"
        return f"({expression}){'' if at_least_one else '?'}"


_Reader = Callable[[FormatGrammar, Mapping[str, Any], str, tuple[str, ...]], str]
_CONTROL = ("at_least_one", "stop_after_first")
#: By type: what reads a format, and its fields.
_READERS: dict[str, tuple[_Reader, tuple[str, ...]]] = {
    "const_string": (FormatGrammar._const, ("value",)),
    "json_schema": (FormatGrammar._json, ("json_schema", "style", "any_order")),
    "regex": (FormatGrammar._regex, ("pattern",)),
    "grammar": (FormatGrammar._grammar, ("grammar",)),
    "any_text": (FormatGrammar._any_text, ("excludes", "max_chars", "max_tokens")),
    "sequence": (FormatGrammar._sequence, ("elements",)),
    "or": (FormatGrammar._or, ("elements",)),
    "optional": (FormatGrammar._repeated, ("content",)),
    "star": (FormatGrammar._repeated, ("content",)),
    "plus": (FormatGrammar._repeated, ("content",)),
    "repeat": (FormatGrammar._repeated, ("content", "min", "max")),
    "tag": (FormatGrammar._tag, ("begin", "content", "end")),
    "triggered_tags": (FormatGrammar._triggered, ("triggers", "tags", "excludes", *_CONTROL)),
    "tags_with_separator": (FormatGrammar._separated, ("tags", "separator", *_CONTROL)),
}
#: Formats that are read with what ends them.
_WITH_ENDS = frozenset({"any_text", "or", "sequence", "triggered_tags"})


def _ends_with_text(node: Any) -> bool:
    """Whether a format may end with free text."""
    kind = node.get("type") if isinstance(node, dict) else None
    if kind in ("or", "sequence"):
        parts = node.get("elements")
        ends = parts if kind == "or" else parts[-1:] if isinstance(parts, list) else None
        return isinstance(ends, list) and any(map(_ends_with_text, ends))
    return kind in ("any_text", "triggered_tags")


def _closing(ends: tuple[str, ...]) -> str:
    """The expression of one of `ends`; nothing if there are none."""
    return f"({' | '.join(map(literal, ends))})" if ends else ""


def _fields(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConstraintError(f"{path} must be an object with a type")
    return value


def _text(node: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(value := node.get(name), str):
        raise ConstraintError(f"{path}.{name} must be a string")
    return value


def _list(node: Mapping[str, Any], name: str, path: str) -> list[Any]:
    if not isinstance(value := node.get(name), list) or not value:
        raise ConstraintError(f"{path}.{name} must be a list that is not empty")
    return value


def _texts(node: Mapping[str, Any], name: str, path: str) -> list[str]:
    value = node.get(name, [] if name == "excludes" else None)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConstraintError(f"{path}.{name} must be a list of strings")
    return value


def _number(node: Mapping[str, Any], name: str, path: str, low: int, high: int) -> int:
    value = node.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConstraintError(f"{path}.{name} must be an integer, {low} to {high}")
    return value


def _flags(node: Mapping[str, Any], path: str) -> list[bool]:
    flags = [node.get(name, False) for name in _CONTROL]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ConstraintError(f"{path}: {' and '.join(_CONTROL)} must be true or false")
    return flags


def _escaped(found: re.Match[str]) -> str:
    """A slash or the end of a line, as a regular expression between slashes has them."""
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(found[0], found[0])
