"""Context-free grammars of JSON Schemas, for decoders that complete a canvas.

Every text of the grammar is valid JSON under the schema. The schemas are those that the mask engine
receives: other keywords have been removed or rewritten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from anydecode.constraints.grammar.byte_grammar import (
    ByteGrammar,
    byte_grammar,
    grammar_of,
    inlined,
)
from anydecode.constraints.grammar.byte_regex import (
    EMPTY,
    Expression,
    characters,
    choice,
    literal,
    read_regex,
    repeated,
    sequence,
)
from anydecode.constraints.json.termination import resolve_reference
from anydecode.constraints.json.witnesses import search_expression
from anydecode.errors import ConstraintError

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: The keywords that a rule can express, by the type that they apply to.
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_BY_TYPE["integer"] = _BY_TYPE["number"]
#: Keywords that forbid nothing by themselves.
_ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "$schema", "$id", "id", "$comment", "$anchor", "$defs", "definitions", "discriminator",
        "x-guidance", "contentEncoding", "contentMediaType",
    }
)  # fmt: skip


def _bytes(*ranges: tuple[int, int]) -> Expression:
    """One byte of the inclusive ranges."""
    return "set", sum((2 << last) - (1 << first) for first, last in ranges)


_CONTINUATION = _bytes((0x80, 0xBF))
#: All but the last byte of a character of several bytes in UTF-8: written so that the characters
#: share the states of their last bytes.
_LEADING = choice(
    [
        _bytes((0xC2, 0xDF)),
        sequence([_bytes((0xE0, 0xE0)), _bytes((0xA0, 0xBF))]),
        sequence([_bytes((0xED, 0xED)), _bytes((0x80, 0x9F))]),
        sequence(
            [
                choice(
                    [
                        _bytes((0xE1, 0xEC), (0xEE, 0xEF)),
                        sequence([_bytes((0xF0, 0xF0)), _bytes((0x90, 0xBF))]),
                        sequence([_bytes((0xF1, 0xF3)), _CONTINUATION]),
                        sequence([_bytes((0xF4, 0xF4)), _bytes((0x80, 0x8F))]),
                    ]
                ),
                _CONTINUATION,
            ]
        ),
    ]
)
#: A character that JSON strings hold as it is.
_PLAIN = choice(
    [_bytes((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)), sequence([_LEADING, _CONTINUATION])]
)
#: Characters that need an escape, and what is written for them.
_ESCAPED = {ord(one): json.dumps(one)[1:-1] for one in '"\\\b\f\n\r\t'}
_CHARACTER = choice([_PLAIN, *(literal(written) for written in _ESCAPED.values())])
_QUOTE = literal('"')
#: The bytes of `_PLAIN`, as a set.
_PLAIN_BYTES = sum(1 << byte for byte in range(0x20, 256) if byte not in b'"\\')
_FRACTION = r"(\.[0-9]+)?"


_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_DATE = (
    f"[0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_CLOCK_DURATION = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[a-zA-Z0-9]{1,15}(-[a-zA-Z0-9]{1,15}){0,2}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
#: What strings of each format hold here. The formats have further values.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK_DURATION})?|{_CLOCK_DURATION}|[0-9]+W)",
    "email": rf"[a-zA-Z0-9_+-]{{1,20}}(\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_HOST}\.[a-z]{{2,12}}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [
            f"({_GROUP}:){{7}}{_GROUP}",
            f"::({_GROUP}(:{_GROUP}){{0,6}})?",
            *(
                f"{_GROUP}(:{_GROUP}){{{left}}}::({_GROUP}(:{_GROUP}){{0,{5 - left}}})?"
                for left in range(6)
            ),
            f"{_GROUP}(:{_GROUP}){{6}}::",
        ]
    ),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"(https?|ftp)://{_HOST}(:[0-9]{{1,4}})?(/[a-zA-Z0-9._~-]*)*(\?[a-zA-Z0-9=&_-]*)?"
    "|urn:[a-z][a-z0-9]{1,30}:[a-zA-Z0-9:._-]+",
}


def canvas_grammar_of(description: str) -> ByteGrammar:
    """The automata of a constraint: of a JSON Schema, or as `byte_grammar`.

    Args:
        description: A Lark grammar, or llguidance's JSON with one grammar or schema in it.

    Raises:
        ConstraintError: The constraint is not supported or too large.
    """
    schema = None
    if description.lstrip().startswith("{"):
        grammars = json.loads(description)["grammars"]
        schema = grammars[0].get("json_schema") if len(grammars) == 1 else None
    if schema is None:
        return byte_grammar(description)
    return grammar_of(lambda: inlined(_SchemaRules(schema).rules))


class _SchemaRules:
    """The rules of a schema: `rules[name]`; rule "" is the whole text."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
        space = options.get("whitespace_pattern")
        self._space = EMPTY if space is None else read_regex(space)
        self._comma = literal(options.get("item_separator", ",").strip(" "))
        self._after_comma = literal(" ") if options.get("item_separator") == ", " else self._space
        self._colon = literal(options.get("key_separator", ":").strip(" "))
        self._after_colon = literal(" ") if options.get("key_separator") == ": " else self._space
        self.rules: dict[str, Expression] = {}
        self.rules[""] = self._value(schema)

    def _rule(self, name: str, build: Callable[[], Expression]) -> Expression:
        """A reference to the rule `name`, which is built once."""
        if name not in self.rules:
            self.rules[name] = EMPTY  # a recursive schema refers to the rule that is being built
            self.rules[name] = build()
        return ("ref", name)

    def _value(self, schema: Any) -> Expression:
        if schema is True or schema == {}:
            return self._rule("any value", lambda: self._of_types({}, _TYPES))
        if schema is False:
            return choice(())
        keywords = schema.keys() - _ANNOTATIONS
        if not keywords:
            return self._value(True)
        for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
            if keyword in keywords:
                others = (
                    keywords - {keyword} - ({"type"} if keyword in ("enum", "const") else set())
                )
                if others:
                    raise _unsupported(min(others), f"beside {keyword}")
                return self._combined(keyword, schema)
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else list(types)
        known = {"type"}.union(*_BY_TYPE.values())
        if keywords - known:
            raise _unsupported(min(keywords - known))
        return self._of_types(schema, types)

    def _combined(self, keyword: str, schema: dict[str, Any]) -> Expression:
        """The values of a schema that has one of the keywords that combine or list values."""
        value = schema[keyword]
        if keyword == "$ref":
            target = resolve_reference(self._root, value)
            if target is None:
                raise _unsupported("$ref", "to another schema")
            return self._rule(value, lambda: self._value(target))
        if keyword in ("enum", "const"):
            types = schema.get("type", _TYPES)
            types = [types] if isinstance(types, str) else types
            values = value if keyword == "enum" else [value]
            return choice(
                literal(json.dumps(one, ensure_ascii=False))
                for one in values
                if any(_is_of(one, name) for name in types)
            )
        if keyword == "allOf" and len(value) != 1:
            raise _unsupported("allOf", "with several schemas")
        return choice(self._value(part) for part in value)

    def _of_types(self, schema: dict[str, Any], types: Iterable[str]) -> Expression:
        names = list(types)
        if "number" in names and "integer" in names:
            names.remove("integer")
        return choice(self._of_type(schema, name) for name in names)

    def _of_type(self, schema: dict[str, Any], name: str) -> Expression:
        if name == "object":
            return self._object(schema)
        if name == "array":
            return self._array(schema)
        if name == "string":
            return _string(schema)
        if name in ("number", "integer"):
            return _number(schema, is_integer=name == "integer")
        return literal("null") if name == "null" else choice([literal("true"), literal("false")])

    def _object(self, schema: dict[str, Any]) -> Expression:
        properties = dict(schema.get("properties", {}))
        required = schema.get("required", ())
        additional = schema.get("additionalProperties", True)
        properties.update({name: additional for name in required if name not in properties})
        pairs = [
            (self._pair(literal(json.dumps(name, ensure_ascii=False)), value), name in required)
            for name, value in properties.items()
            if value is not False or name in required
        ]
        extra = EMPTY
        if additional is not False:
            name = sequence([_QUOTE, _other_names([*properties]), _QUOTE])
            extra = self._pair(name, additional)
        options = []
        for index, (pair, is_required) in enumerate(pairs):  # the first property that is present
            tail = [self._later(*later) for later in pairs[index + 1 :]]
            if extra != EMPTY:
                tail.append(("star", self._later(extra, True)))
            options.append(sequence([pair, *tail]))
            if is_required:
                break
        else:
            if extra != EMPTY:
                options.append(sequence([extra, ("star", self._later(extra, True))]))
            options.append(EMPTY)
        content = [sequence([self._space, one, self._space]) for one in options]
        return sequence([literal("{"), choice(content), literal("}")])

    def _pair(self, name: Expression, value: Any) -> Expression:
        return sequence([name, self._colon, self._after_colon, self._value(value)])

    def _later(self, part: Expression, is_required: bool) -> Expression:
        """A member that is not the first one of its object or array."""
        after = sequence([self._comma, self._after_comma, part])
        return after if is_required else choice([after, EMPTY])

    def _array(self, schema: dict[str, Any]) -> Expression:
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            raise _unsupported("items", "as a list")
        lowest, highest = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False:
            highest = len(first) if highest is None else min(highest, len(first))
        if highest is not None and highest < lowest:
            return choice(())
        parts = [self._value(part) for part in first[:highest]]
        num_rest = None if highest is None else highest - len(parts)
        if not parts and num_rest != 0:
            parts.append(self._value(rest))
            num_rest = None if num_rest is None else num_rest - 1
        tail = EMPTY
        if num_rest != 0:
            later = self._later(self._value(rest), True)
            tail = repeated(later, max(0, lowest - len(parts)), num_rest)
        for index in range(len(parts) - 1, 0, -1):
            tail = sequence([self._later(parts[index], True), tail])
            if index >= lowest:
                tail = choice([tail, EMPTY])
        options = [sequence([self._space, parts[0], tail, self._space])] if parts else []
        if lowest == 0:
            options.append(self._space)
        return sequence([literal("["), choice(options), literal("]")])


def _string(schema: dict[str, Any]) -> Expression:
    lowest, highest = schema.get("minLength", 0), schema.get("maxLength")
    for keyword in ("pattern", "format"):
        if keyword in schema and (lowest or highest is not None):
            raise _unsupported(keyword, "with a length")
    if "format" in schema:
        if "pattern" in schema or schema["format"] not in _FORMATS:
            raise _unsupported("format", schema["format"])
        content = read_regex(_FORMATS[schema["format"]])
    elif "pattern" in schema:
        content = _written(search_expression(schema["pattern"]))
    else:
        if highest is not None and highest < lowest:
            return choice(())
        content = repeated(_CHARACTER, lowest, highest)
    return sequence([_QUOTE, content, _QUOTE])


def _written(part: Expression) -> Expression:
    """The texts of an expression as JSON strings hold them."""
    kind, body = part
    if kind == "set":
        options = [literal(written) for byte, written in _ESCAPED.items() if body >> byte & 1]
        return choice([("set", body & _PLAIN_BYTES), *options])
    if kind == "star":
        return kind, _written(body)
    return kind, tuple(_written(inner) for inner in body)


def _other_names(names: list[str]) -> Expression:
    """The names without escapes that are none of `names`."""
    rest = ("star", _PLAIN)
    options: list[Expression] = []
    if "" not in names:
        options.append(EMPTY)
    letters: dict[str, list[str]] = {}
    for name in names:
        if name:
            letters.setdefault(name[0], []).append(name[1:])
    for letter, ends in letters.items():
        if letter >= " " and letter not in '"\\':
            options.append(sequence([literal(letter), _other_names(ends)]))
    taken = sorted({ord(letter) for letter in letters} | {0x22, 0x5C})
    gaps, start = [], 0x20
    for point in [*taken, 0x110000]:
        if start < point:
            gaps.append((start, point - 1))
        start = max(start, point + 1)
    options.append(sequence([characters(gaps), rest]))
    return choice(options)


def _number(schema: dict[str, Any], is_integer: bool) -> Expression:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = (
        schema.get("exclusiveMinimum", -math.inf),
        schema.get("exclusiveMaximum", math.inf),
    )
    if is_integer:
        smallest = max(_ceiling(low), -math.inf if above == -math.inf else math.floor(above) + 1)
        largest = min(_floor(high), math.inf if below == math.inf else math.ceil(below) - 1)
        return choice(_integers(smallest, largest))
    bounds = [bound for bound in (low, high, above, below) if math.isfinite(bound)]
    if any(bound != int(bound) for bound in bounds):
        raise _unsupported("minimum or maximum", "of numbers, if it is not whole")
    positive = _magnitudes(max(low, above), low >= above, min(high, below), high <= below)
    negative = _magnitudes(-min(high, below), high <= below, -max(low, above), low >= above)
    return choice([*positive, *(sequence([literal("-"), one]) for one in negative)])


def _floor(value: float) -> float:
    return value if math.isinf(value) else math.floor(value)


def _ceiling(value: float) -> float:
    return value if math.isinf(value) else math.ceil(value)


def _magnitudes(low: float, with_low: bool, high: float, with_high: bool) -> list[Expression]:
    """Decimal numbers from 0 on between two whole bounds, of which each may be excluded."""
    if high < 0 or (high == low and not (with_low and with_high)) or high < low:
        return []
    parts: list[Expression] = []
    first: float = 0 if low < 0 else int(low)
    if low >= 0 and not with_low:  # the fraction after the lowest whole number is not 0
        if high > low:
            parts.append(sequence([literal(str(int(low))), read_regex(r"\.[0-9]*[1-9][0-9]*")]))
        first += 1
    for whole in _digits(first, high - 1):
        parts.append(sequence([whole, read_regex(_FRACTION)]))
    if with_high and math.isfinite(high) and high >= first:
        parts.append(sequence([literal(str(int(high))), read_regex(r"(\.0+)?")]))
    return parts


def _integers(low: float, high: float) -> list[Expression]:
    """The integers from `low` to `high`."""
    negative = [sequence([literal("-"), one]) for one in _digits(max(1, -high), -low)]
    return [*negative, *_digits(max(0, low), high)]


def _digits(low: float, high: float) -> list[Expression]:
    """The whole numbers from `low`, at least 0, to `high`, without leading zeros."""
    if high < low:
        return []
    if math.isinf(high):
        length = len(str(int(low)))
        longer = read_regex(f"[1-9][0-9]{{{length}}}[0-9]*")
        return [*_digits(low, 10**length - 1), longer]
    first, last = str(int(low)), str(int(high))
    if len(first) < len(last):
        middle = 10 ** len(first)
        return [*_digits(low, middle - 1), *_digits(middle, high)]
    return [_same_length(first, last)]


def _same_length(first: str, last: str) -> Expression:
    """The numbers from `first` to `last`, which have equally many digits."""
    if not first:
        return EMPTY
    rest = len(first) - 1
    if first[0] == last[0]:
        return sequence([literal(first[0]), _same_length(first[1:], last[1:])])
    low, high = int(first[0]), int(last[0])
    options: list[Expression] = []
    if first[1:] != "0" * rest:
        options.append(sequence([literal(first[0]), _same_length(first[1:], "9" * rest)]))
        low += 1
    if last[1:] != "9" * rest:
        options.append(sequence([literal(last[0]), _same_length("0" * rest, last[1:])]))
        high -= 1
    if low <= high:
        options.append(read_regex(f"[{low}-{high}][0-9]{{{rest}}}" if rest else f"[{low}-{high}]"))
    return choice(options)


def _is_of(value: Any, name: str) -> bool:
    """Whether a JSON value has the type `name`."""
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "null": type(None)}
    return name in kinds and isinstance(value, kinds[name])


def _unsupported(keyword: str, where: str = "") -> ConstraintError:
    return ConstraintError(
        f"diffusion-cfg does not support {keyword}{where and ' '}{where} in a JSON schema: leave it"
        " out, or decode with another method"
    )
