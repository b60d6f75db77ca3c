"""Context-free grammars of JSON Schemas, for decoders that complete a canvas.

Every text of the grammar is valid JSON under the schema. The schemas are those that the mask engine
receives: other keywords have been removed or rewritten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from decimal import Decimal
from functools import partial
from typing import Any

from anydecode.constraints.grammar.automata import MAX_STATES, TOO_LARGE, partitioned
from anydecode.constraints.grammar.byte_grammar import (
    ByteGrammar,
    byte_grammar,
    grammar_of,
    inlined,
)
from anydecode.constraints.grammar.byte_regex import (
    EMPTY,
    MAX_COPIES,
    Expression,
    choice,
    literal,
    map_parts,
    read_regex,
    repeated,
    sequence,
)
from anydecode.constraints.json.canonical import DEFINITIONS, all_of
from anydecode.constraints.json.relaxing import ASSERTING, subschemas
from anydecode.constraints.json.termination import resolve_reference
from anydecode.constraints.json.witnesses import search_expression
from anydecode.constraints.patterns import matches
from anydecode.errors import ConstraintError

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: The keywords that a rule can express, by the type that they apply to.
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "patternProperties",
            "minProperties", "maxProperties",
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}  # fmt: skip
_BY_TYPE["integer"] = _BY_TYPE["number"]
#: Keywords that list values or combine schemas.
_COMBINING = ("$ref", "anyOf", "allOf", "enum", "const")
#: Maximum number of schemas that are merged, and of the remainders of a multiple, counted again for
#: each decimal.
_MAX_MERGED, _MAX_REMAINDERS = 1_000, 2_000
#: What a larger maxLength counts as in a grammar that is too large otherwise: the first that helps.
_SHORTER = (200, 40)


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
        description: A Lark grammar, or llguidance's JSON with one grammar or schema in it. Beside
            a schema, "stronger" may list schemas that say more, the strongest first: the first one
            that can be expressed is taken.

    Raises:
        ConstraintError: The constraint is not supported or too large.
    """
    described, schema = {}, None
    if description.lstrip().startswith("{"):
        described = json.loads(description)
        grammars = described["grammars"]
        schema = grammars[0].get("json_schema") if len(grammars) == 1 else None
    if schema is None:
        return byte_grammar(description)
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    for stronger in described.get("stronger", ()):
        try:
            return _grammar_of_schema(stronger, options)
        except ConstraintError:
            continue
    return _grammar_of_schema(schema, options)


def _grammar_of_schema(schema: Any, options: dict[str, Any]) -> ByteGrammar:
    lengths = [node.get("maxLength") for _, node in subschemas(schema)]
    longest = max((one for one in lengths if isinstance(one, int | float)), default=0)
    *limits, last = (MAX_COPIES, *(limit for limit in _SHORTER if limit < longest))

    def grammar(limit: int) -> ByteGrammar:
        return grammar_of(lambda: inlined(_SchemaRules(schema, options, limit).rules))

    for limit in limits:
        try:
            return grammar(limit)
        except ConstraintError as error:
            if str(error) != TOO_LARGE:
                raise
    return grammar(last)


class _SchemaRules:
    """The rules of a schema: `rules[name]`; rule "" is the whole text. `options` are llguidance's,
    "x-guidance". A maxLength above `limit` counts as that."""

    def __init__(self, schema: Any, options: dict[str, Any], limit: int) -> None:
        self._limit = limit
        self._root = schema = _with_any_of(schema)
        self._definitions = {
            key: schema[key] for key in DEFINITIONS if isinstance(schema, dict) and key in schema
        }
        self._num_merged = 0
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
        if schema is False:
            return choice(())
        keywords = schema.keys() & {*ASSERTING, "$ref"} if isinstance(schema, dict) else set()
        if not keywords:  # others are annotations
            return self._rule("any value", lambda: self._of_types({}, _TYPES))
        combining = [keyword for keyword in _COMBINING if keyword in keywords]
        if not combining:
            unknown = keywords - {"type"}.union(*_BY_TYPE.values())
            if unknown:
                raise _unsupported(min(unknown))
            return self._of_types(schema, _types_of(schema))
        keyword = combining[0]
        others = keywords - {keyword} - ({"type"} if keyword in ("enum", "const") else set())
        if others or (keyword == "allOf" and len(schema[keyword]) != 1):
            rest = {one: schema[one] for one in sorted(keywords)}
            return self._rule(json.dumps(rest), partial(self._merged, rest))
        return self._combined(keyword, schema)

    def _combined(self, keyword: str, schema: dict[str, Any]) -> Expression:
        """The values of a schema with no other keyword than one that combines or lists values."""
        value = schema[keyword]
        if keyword == "$ref":
            return self._rule(value, lambda: self._value(self._target(value)))
        if keyword in ("enum", "const"):
            return choice(
                literal(json.dumps(one, ensure_ascii=False))
                for one in (value if keyword == "enum" else [value])
                if any(_is_of(one, name) for name in _types_of(schema))
            )
        return choice(self._value(part) for part in value)

    def _target(self, reference: str) -> Any:
        target = resolve_reference(self._root, reference)
        if target is None:
            raise _unsupported("$ref", "to another schema")
        return target

    def _merged(self, schema: dict[str, Any]) -> Expression:
        """The values of a schema with several keywords, of which one combines schemas."""
        merged = self._all_of([schema])
        if not isinstance(merged, dict):
            return self._value(merged)
        rest = {key: value for key, value in merged.items() if key in ASSERTING or key == "$ref"}
        options = rest.pop("anyOf", None)
        if options is not None and rest:
            return choice(self._value(self._all_of([rest, option])) for option in options)
        joined = rest.pop("allOf", ())
        if len(joined) + len(rest) > 1 and (joined or "$ref" in rest):
            parts = []
            for part in (rest, *joined):
                if isinstance(part, dict) and "$ref" in part:
                    parts.append(self._target(part["$ref"]))
                    part = {key: value for key, value in part.items() if key != "$ref"}
                parts.append(part)
            if len(parts) == 1 + len(joined):
                raise _unsupported("allOf", "of schemas that cannot be merged into one")
            merged = self._all_of(parts)
        return self._value(merged)

    def _all_of(self, schemas: list[Any]) -> Any:
        """A schema of the values that all of `schemas` allow."""
        different = [one for index, one in enumerate(schemas) if one not in schemas[:index]]
        if len(different) == 1 and different[0] in (True, False):
            return different[0]
        self._num_merged += 1
        merged = all_of(different, self._definitions) if self._num_merged <= _MAX_MERGED else None
        if merged is None:
            keywords = {key for one in different if isinstance(one, dict) for key in one}
            raise _unsupported(
                min(keywords & {*ASSERTING, "$ref"}), "beside keywords it cannot be merged with"
            )
        return merged

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
            return _string(schema, self._limit)
        if name in ("number", "integer"):
            return _number(schema, is_integer=name == "integer")
        return literal("null") if name == "null" else choice([literal("true"), literal("false")])

    def _object(self, schema: dict[str, Any]) -> Expression:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        by_pattern = schema.get("patternProperties", {})
        additional = schema.get("additionalProperties", True)

        def value_of(found: list[Any]) -> Any:
            return self._all_of(found) if len(found) > 1 else [*found, additional][0]

        names = [*dict.fromkeys([*properties, *required])]
        written = [literal(json.dumps(name, ensure_ascii=False)[1:-1]) for name in names]
        pairs = []
        for name, content in zip(names, written, strict=True):
            matching = [one for pattern, one in by_pattern.items() if matches(pattern, name)]
            value = value_of([properties[name], *matching] if name in properties else matching)
            if value is not False or name in required:
                pairs.append((self._pair(content, value), name in required))
        extra = []
        if by_pattern or additional is not False:
            patterns = [_written(search_expression(pattern)) for pattern in by_pattern]
            values = [*by_pattern.values()]
            divided = partitioned(("star", _PLAIN), [*patterns, choice(written)])
            for parts, content in divided.items():
                if len(patterns) in parts:
                    continue  # a listed name
                value = value_of([values[index] for index in sorted(parts)])
                if value is not False:
                    extra.append(self._pair(content, value))
        counts = _counts(schema, "Properties")
        members = self._members(pairs, choice(extra) if extra else None, *counts)
        return sequence([literal("{"), self._space, members, self._space, literal("}")])

    def _members(
        self,
        pairs: list[tuple[Expression, bool]],
        extra: Expression | None,
        lowest: int,
        highest: int | None,
    ) -> Expression:
        """The members of an object, in order.

        Args:
            pairs: The listed members, each with whether it is required.
            extra: A further member, of which there may be any number; None: there is none.
            lowest: The minimum number of members, and `highest` the maximum (None: unbounded).
        """
        if extra is None and highest is not None and highest >= len(pairs):
            highest = None
        # Members are counted up to `top`; there, without a maximum, any number more may follow.
        top = max(lowest, 1) if highest is None else highest
        if (len(pairs) + 1) * (top + 1) > MAX_STATES:
            raise ConstraintError(TOO_LARGE)
        edges: list[tuple[int, Expression, int]] = []
        num_nodes = 2  # the start, and the end

        def target(counts: dict[int, int], count: int) -> int:
            nonlocal num_nodes
            if count not in counts:
                counts[count] = num_nodes
                num_nodes += 1
            return counts[count]

        def read(member: Expression, count: int, node: int, after: dict[int, int]) -> None:
            """Adds an edge on which a member is read after `count` others."""
            if count != highest:
                to = target(after, min(count + 1, top))
                edges.append((node, self._later(member) if count else member, to))

        counts = {0: 0}  # the nodes before the next listed member, by the number of members
        for pair, is_required in pairs:
            after: dict[int, int] = {}
            for count, node in counts.items():
                read(pair, count, node, after)
                if not is_required:
                    edges.append((node, EMPTY, target(after, count)))
            counts = after
        if extra is not None and counts:
            for count in range(min(counts), top + 1):
                read(extra, count, counts[count], counts)
        edges += [(node, EMPTY, 1) for count, node in counts.items() if count >= lowest]
        return "graph", tuple(edges)

    def _pair(self, name: Expression, value: Any) -> Expression:
        return sequence([_QUOTE, name, _QUOTE, self._colon, self._after_colon, self._value(value)])

    def _later(self, part: Expression) -> Expression:
        """A member that is not the first one of its object or array."""
        return sequence([self._comma, self._after_comma, part])

    def _array(self, schema: dict[str, Any]) -> Expression:
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            raise _unsupported("items", "as a list")
        lowest, highest = _counts(schema, "Items")
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
            later = self._later(self._value(rest))
            tail = repeated(later, max(0, lowest - len(parts)), num_rest)
        for index in range(len(parts) - 1, 0, -1):
            tail = sequence([self._later(parts[index]), tail])
            if index >= lowest:
                tail = choice([tail, EMPTY])
        options = [sequence([self._space, parts[0], tail, self._space])] if parts else []
        if lowest == 0:
            options.append(self._space)
        return sequence([literal("["), choice(options), literal("]")])


def _counts(schema: dict[str, Any], what: str) -> tuple[int, int | None]:
    """The minimum and the maximum number of items, characters or properties."""
    highest = schema.get(f"max{what}")
    return math.ceil(schema.get(f"min{what}", 0)), None if highest is None else math.floor(highest)


def _string(schema: dict[str, Any], limit: int) -> Expression:
    lowest, highest = _counts(schema, "Length")
    if highest is not None and highest < lowest:
        return choice(())
    parts = []
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise _unsupported("format", schema["format"])
        parts.append(read_regex(_FORMATS[schema["format"]]))
    if "pattern" in schema:
        parts.append(_written(search_expression(schema["pattern"])))
    if lowest or highest is not None or not parts:
        most = None if highest is None else max(lowest, min(highest, limit))
        parts.append(repeated(_CHARACTER, lowest, most))
    return sequence([_QUOTE, _intersection(parts), _QUOTE])


def _intersection(parts: list[Expression]) -> Expression:
    """The texts that all of `parts` match."""
    if len(parts) == 1:
        return parts[0]
    everything = frozenset(range(len(parts) - 1))
    return partitioned(parts[-1], parts[:-1]).get(everything, choice(()))


def _written(part: Expression) -> Expression:
    """The texts of an expression as JSON strings hold them."""
    kind, body = part
    if kind == "set":
        options = [literal(written) for byte, written in _ESCAPED.items() if body >> byte & 1]
        return choice([("set", body & _PLAIN_BYTES), *options])
    return map_parts(part, _written)


def _with_any_of(schema: Any) -> Any:
    """`schema` with `oneOf` as `anyOf`. Values that several alternatives allow are left to the
    validator, as those that the mask engine allows."""
    result = deepcopy(schema)
    for _, node in subschemas(result):
        if "oneOf" in node:
            options = {"anyOf": node.pop("oneOf")}
            if "anyOf" in node:
                node["allOf"] = [*node.get("allOf", ()), options]
            else:
                node |= options
    return result


def _types_of(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", _TYPES)
    return [types] if isinstance(types, str) else list(types)


def _number(schema: dict[str, Any], is_integer: bool) -> Expression:
    low, above = _bound(schema, "minimum", -1), _bound(schema, "exclusiveMinimum", -1)
    high, below = _bound(schema, "maximum", 1), _bound(schema, "exclusiveMaximum", 1)
    if is_integer:
        smallest = -math.inf if low.is_infinite() else math.ceil(low)
        largest = math.inf if high.is_infinite() else math.floor(high)
        if above.is_finite():
            smallest = max(smallest, math.floor(above) + 1)
        if below.is_finite():
            largest = min(largest, math.ceil(below) - 1)
        options = _integers(smallest, largest)
    else:
        least, most = max(low, above), min(high, below)
        positive = _magnitudes(least, low > above, most, high < below)
        negative = _magnitudes(-most, high < below, -least, low > above)
        options = [*positive, *(sequence([literal("-"), one]) for one in negative)]
    if "multipleOf" not in schema:
        return choice(options)
    return _intersection([_multiples(Decimal(str(schema["multipleOf"]))), choice(options)])


def _bound(schema: dict[str, Any], keyword: str, sign: int) -> Decimal:
    """A bound of a number; if there is none, infinity of this sign."""
    value = schema.get(keyword, sign * math.inf)
    if isinstance(value, bool):
        raise _unsupported(keyword, "as a boolean")
    return Decimal(str(value))


def _multiples(step: Decimal) -> Expression:
    """The decimal numbers that are multiples of `step`: an automaton of the remainder of the digits
    so far, and of the number of decimals."""
    scale = max(0, -int(step.normalize().as_tuple().exponent))
    modulus = int(step.scaleb(scale))
    if modulus * (scale + 2) > _MAX_REMAINDERS:
        raise _unsupported("multipleOf", f"{step}, which has too many remainders,")
    edges: list[tuple[int, Expression, int]] = [(0, literal("-"), 2)]

    def node(num_decimals: int, remainder: int) -> int:
        """The node after so many decimals; -1: before the point."""
        return 3 + (num_decimals + 1) * modulus + remainder

    digits = [literal(str(digit)) for digit in range(10)]
    for digit, read in enumerate(digits):
        edges += [(start, read, node(-1, digit % modulus)) for start in (0, 2)]
    for remainder in range(modulus):
        edges.append((node(-1, remainder), literal("."), node(0, remainder)))
        for place in range(-1, scale):
            after = place if place < 0 else place + 1
            edges += [
                (node(place, remainder), read, node(after, (10 * remainder + digit) % modulus))
                for digit, read in enumerate(digits)
            ]
        edges.append((node(scale, remainder), digits[0], node(scale, remainder)))
        edges += [
            (node(place, remainder), EMPTY, 1)
            for place in range(-1, scale + 1)
            if remainder * 10 ** (scale - max(place, 0)) % modulus == 0
        ]
    return "graph", tuple(edges)


def _magnitudes(low: Decimal, with_low: bool, high: Decimal, with_high: bool) -> list[Expression]:
    """Decimal numbers from 0 on between two bounds, of which each may be excluded."""
    if high < 0 or (high == low and not (with_low and with_high)) or high < low:
        return []
    parts = []
    if low > 0 or (low == 0 and not with_low):
        whole, decimals = _divided(low)
        more = sequence([choice(_digits(whole + 1, math.inf)), read_regex(_FRACTION)])
        parts.append(choice([more, sequence([literal(str(whole)), _above(decimals, with_low)])]))
    if high.is_finite():
        whole, decimals = _divided(high)
        less = sequence([choice(_digits(0, whole - 1)), read_regex(_FRACTION)])
        parts.append(choice([less, sequence([literal(str(whole)), _below(decimals, with_high)])]))
    if not parts:
        parts.append(sequence([choice(_digits(0, math.inf)), read_regex(_FRACTION)]))
    return [_intersection(parts)]


def _divided(bound: Decimal) -> tuple[int, str]:
    """A number's whole part, and its decimals without zeros at the end."""
    whole, _, decimals = format(bound, "f").partition(".")
    return int(whole), decimals.rstrip("0")


def _above(decimals: str, with_equal: bool) -> Expression:
    """The fractions, with their point, that are at least `decimals`, or more."""
    if not decimals:
        return read_regex(_FRACTION if with_equal else r"\.[0-9]*[1-9][0-9]*")
    found = read_regex("[0-9]*" if with_equal else "[0-9]*[1-9][0-9]*")
    for digit in reversed(decimals):
        found = sequence([literal(digit), found])
        if digit < "9":
            found = choice([found, read_regex(f"[{int(digit) + 1}-9][0-9]*")])
    return sequence([literal("."), found])


def _below(decimals: str, with_equal: bool) -> Expression:
    """The fractions, with their point, that are at most `decimals`, or less."""
    if not decimals:
        return read_regex(r"(\.0+)?") if with_equal else choice(())
    found = read_regex("0*") if with_equal else choice(())
    for index, digit in reversed([*enumerate(decimals)]):
        if index < len(decimals) - 1:
            found = choice([EMPTY, found])
        found = sequence([literal(digit), found])
        if digit > "0":
            found = choice([found, read_regex(f"[0-{int(digit) - 1}][0-9]*")])
    return choice([EMPTY, sequence([literal("."), found])])


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
