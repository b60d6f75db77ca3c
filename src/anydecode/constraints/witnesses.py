"""Properties that an object must have although its schema does not name them.

"Not all names are such" and "not every property of such a name has such a value" ask for one that
differs. No mask says that; a property with a name found here, and a value that fits, meets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jsonschema_rs

from anydecode.constraints.byte_grammar import ByteGrammar
from anydecode.constraints.byte_regex import EMPTY, Expression, characters, read_regex, sequence
from anydecode.constraints.patterns import matches, pattern_options
from anydecode.errors import ConstraintError

#: Characters that names are made of, those to be preferred first.
_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_-.$/:@# "
#: Beginnings of names that are looked at, and names that are tried.
_MOST_BEGINNINGS, _MOST_NAMES = 4000, 200
#: Properties that are looked for, and patterns that one name is to match.
_MOST_WANTED, _MOST_PATTERNS = 8, 8
_ANYTHING: Expression = ("star", characters([(0, 0x10FFFF)]))


class Witness(NamedTuple):
    """A property that meets some negations: its name, and what is said of its value."""

    name: str
    values: list[Any]


class _Wanted(NamedTuple):
    """A property that a negation asks for: schemas for its name and for its value."""

    names: Any
    value: Any


def witnesses(schema: dict[str, Any], number: int) -> list[Witness]:
    """Properties that meet every negation of `schema` that asks for one; empty where there is no
    such negation, or no name was found. One property meets as many as it can. The higher
    `number`, the later the alternatives that are chosen."""
    groups: list[tuple[str, list[_Wanted]]] = []
    allowed = _allowed_names(schema)
    all_asked = [*islice(_wanted(schema, number), _MOST_WANTED + 1)]
    if len(all_asked) > _MOST_WANTED:
        return []
    for wanted in all_asked:
        for position, (_, others) in enumerate(groups):
            name = _name([allowed, *(one.names for one in (*others, wanted))])
            if name is not None:
                groups[position] = (name, [*others, wanted])
                break
        else:
            name = _name([allowed, wanted.names])
            if name is None:
                return []
            groups.append((name, [wanted]))
    found = [
        Witness(name, [*_values(schema, name), *(one.value for one in all_wanted)])
        for name, all_wanted in groups
    ]
    return [*found, *_more(schema, allowed, {name for name, _ in found})] if found else []


def _more(schema: dict[str, Any], allowed: Any, taken: set[str]) -> Iterator[Witness]:
    """Other properties, as many as the object must have besides those `taken`."""
    missing = schema.get("minProperties", 0) - len({*taken, *schema.get("required", ())})
    for _ in range(missing):
        name = _name([allowed, {"not": {"enum": sorted(taken)}}])
        if name is None:
            return
        taken.add(name)
        yield Witness(name, _values(schema, name))


def _wanted(schema: dict[str, Any], number: int) -> Iterator[_Wanted]:
    """The properties that negations ask for."""
    for part in (schema, *filter(is_negation, schema.get("allOf", ()))):
        told = part.get("not")
        if not isinstance(told, dict):
            continue
        if "propertyNames" in told:
            yield _Wanted({"not": told["propertyNames"]}, True)
        elif told.get("patternProperties"):
            options = sorted(told["patternProperties"].items())
            pattern, value = options[(number // 2) % len(options)]
            yield _Wanted({"pattern": pattern}, {"not": value})


def is_negation(schema: Any) -> bool:
    """Whether a schema says nothing but `not`."""
    return isinstance(schema, dict) and "not" in schema and schema.keys() <= {"not", "type"}


def _allowed_names(schema: dict[str, Any]) -> Any:
    """What a property of the object may be called."""
    known = schema.get("properties", {})
    parts: list[Any] = [{"type": "string"}, schema.get("propertyNames", True)]
    parts.append({"not": {"enum": [name for name, value in known.items() if value is False]}})
    if schema.get("additionalProperties") is False:
        patterns = [{"pattern": pattern} for pattern in schema.get("patternProperties", ())]
        parts.append({"anyOf": [*patterns, {"enum": list(known)}]})
    return {"allOf": parts}


def _values(schema: dict[str, Any], name: str) -> list[Any]:
    """What the object's schema says of the property `name`."""
    known = schema.get("properties", {})
    found = [known[name]] if name in known else []
    for pattern, value in schema.get("patternProperties", {}).items():
        if matches(pattern, name):
            found.append(value)
    return found or [schema.get("additionalProperties", True)]


def _name(schemas: Sequence[Any]) -> str | None:
    """A name that is valid under all of `schemas`."""
    whole = {"allOf": list(schemas)}
    try:
        validator = jsonschema_rs.validator_for(
            whole, offline=True, pattern_options=pattern_options(whole)
        )
        names = islice(_candidates(schemas), _MOST_NAMES)
        return next((name for name in names if validator.is_valid(name)), None)
    except (ConstraintError, ValueError, RecursionError):  # patterns that one of them cannot read
        return None


def _candidates(schemas: Sequence[Any]) -> Iterator[str]:
    """Names that meet what `schemas` say of them, save what is negated."""
    lists: list[list[str]] = []
    patterns: list[str] = []
    for schema in schemas:
        _collect(schema, lists, patterns)
    if lists:
        yield from (name for name in min(lists, key=len) if isinstance(name, str))
    elif len(distinct := dict.fromkeys(patterns)) <= _MOST_PATTERNS:
        yield from matching([anywhere(pattern) for pattern in distinct])


def _collect(schema: Any, lists: list[list[str]], patterns: list[str]) -> None:
    """The lists of names and the patterns in `schema`."""
    if not isinstance(schema, dict):
        return
    if "enum" in schema:
        lists.append(schema["enum"])
    if "const" in schema:
        lists.append([schema["const"]])
    if "pattern" in schema:
        patterns.append(schema["pattern"])
    for part in schema.get("allOf", ()):
        _collect(part, lists, patterns)
    options = [one for one in schema.get("anyOf", ()) if one != {"enum": []}]
    if len(options) == 1:
        _collect(options[0], lists, patterns)
    told = schema.get("not")
    if (
        isinstance(told, dict)
        and told.keys() <= {"allOf", "type"}
        and len(told.get("allOf", ())) == 1
    ):
        [told] = told["allOf"]  # a canonical schema's way to write what a name is not
    if isinstance(told, dict):
        _collect(told.get("not"), lists, patterns)


def anywhere(pattern: str) -> Expression:
    """The texts that `pattern` matches a part of. Raises `ConstraintError` for what is not regular,
    and for anchors in its midst."""
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = read_regex(pattern[pattern.startswith("^") : len(pattern) - ends])
    before = EMPTY if pattern.startswith("^") else _ANYTHING
    return sequence([before, inner, EMPTY if ends else _ANYTHING])


def matching(expressions: Sequence[Expression]) -> Iterator[str]:
    """Texts of a few ASCII characters that match all `expressions`, the shortest first."""
    automata = [ByteGrammar({"": one}) for one in expressions]
    start = tuple(one.starts[0] for one in automata)
    queue = deque([("", start)])
    seen = {start}
    while queue:
        text, states = queue.popleft()
        if text and _may_end(automata, states):
            yield text
        for byte in _LETTERS:
            after = tuple(
                one.steps[state].get(one.classes[byte], -1)
                for one, state in zip(automata, states, strict=True)
            )
            if -1 in after or len(seen) > _MOST_BEGINNINGS:
                continue
            if after not in seen or _may_end(automata, after):
                seen.add(after)
                queue.append((text + chr(byte), after))


def _may_end(automata: Sequence[ByteGrammar], states: Sequence[int]) -> bool:
    return all(one.ends[state] >= 0 for one, state in zip(automata, states, strict=True))
