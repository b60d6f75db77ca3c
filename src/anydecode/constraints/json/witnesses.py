"""Witnesses: properties that an object must have although its schema does not name them.

A negation such as "not all names match" or "not every property that matches has a valid value"
requires a property that differs. A mask cannot express that. A property with a name found here and
a suitable value satisfies the negation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jsonschema_rs

from anydecode.constraints.grammar.automata import leaves, without_anchors
from anydecode.constraints.grammar.byte_grammar import ByteGrammar
from anydecode.constraints.grammar.byte_regex import (
    EMPTY,
    TEXT_START,
    Expression,
    characters,
    read_regex,
    sequence,
)
from anydecode.constraints.patterns import matches, pattern_options
from anydecode.errors import ConstraintError

#: Characters of names, in order of preference.
_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_-.$/:@# "
#: Maximum number of prefixes searched, and of names tried.
_MAX_PREFIXES, _MAX_NAMES = 4000, 200
#: Maximum number of required properties, and of patterns that one name must match.
_MAX_REQUIREMENTS, _MAX_PATTERNS = 8, 8
_ANYTHING: Expression = ("star", characters([(0, 0x10FFFF)]))


class Witness(NamedTuple):
    """A property that satisfies some negations: its name, and the schemas of its value."""

    name: str
    values: list[Any]


class _Requirement(NamedTuple):
    """A property that a negation requires: schemas for its name and for its value."""

    names: Any
    value: Any


def witnesses(schema: dict[str, Any], index: int) -> list[Witness]:
    """Returns properties that satisfy every negation of `schema` that requires one.

    Empty if there is no such negation or no name was found. One property satisfies as many
    negations as possible. `index` selects among alternatives.
    """
    groups: list[tuple[str, list[_Requirement]]] = []
    allowed = _allowed_names(schema)
    requirements = [*islice(_requirements(schema, index), _MAX_REQUIREMENTS + 1)]
    if len(requirements) > _MAX_REQUIREMENTS:
        return []
    for requirement in requirements:
        for position, (_, others) in enumerate(groups):
            name = _name([allowed, *(entry.names for entry in (*others, requirement))])
            if name is not None:
                groups[position] = (name, [*others, requirement])
                break
        else:
            name = _name([allowed, requirement.names])
            if name is None:
                return []
            groups.append((name, [requirement]))
    result = [
        Witness(name, [*_values(schema, name), *(entry.value for entry in group)])
        for name, group in groups
    ]
    return [*result, *_additional(schema, allowed, {name for name, _ in result})] if result else []


def _additional(schema: dict[str, Any], allowed: Any, used_names: set[str]) -> Iterator[Witness]:
    """Further properties, as many as `minProperties` requires beside `used_names`."""
    missing = schema.get("minProperties", 0) - len({*used_names, *schema.get("required", ())})
    for _ in range(missing):
        name = _name([allowed, {"not": {"enum": sorted(used_names)}}])
        if name is None:
            return
        used_names.add(name)
        yield Witness(name, _values(schema, name))


def _requirements(schema: dict[str, Any], index: int) -> Iterator[_Requirement]:
    """The properties that the negations of `schema` require."""
    for part in (schema, *filter(is_negation, schema.get("allOf", ()))):
        negated = part.get("not")
        if not isinstance(negated, dict):
            continue
        if "propertyNames" in negated:
            yield _Requirement({"not": negated["propertyNames"]}, True)
        elif negated.get("patternProperties"):
            options = sorted(negated["patternProperties"].items())
            pattern, value = options[(index // 2) % len(options)]
            yield _Requirement({"pattern": pattern}, {"not": value})


def is_negation(schema: Any) -> bool:
    """Whether a schema consists of `not` only, beside `type`."""
    return isinstance(schema, dict) and "not" in schema and schema.keys() <= {"not", "type"}


def _allowed_names(schema: dict[str, Any]) -> Any:
    """A schema for the names that properties of the object may have."""
    properties = schema.get("properties", {})
    parts: list[Any] = [{"type": "string"}, schema.get("propertyNames", True)]
    parts.append({"not": {"enum": [name for name, value in properties.items() if value is False]}})
    if schema.get("additionalProperties") is False:
        patterns = [{"pattern": pattern} for pattern in schema.get("patternProperties", ())]
        parts.append({"anyOf": [*patterns, {"enum": list(properties)}]})
    return {"allOf": parts}


def _values(schema: dict[str, Any], name: str) -> list[Any]:
    """The schemas that apply to the property `name` of the object."""
    properties = schema.get("properties", {})
    result = [properties[name]] if name in properties else []
    for pattern, value in schema.get("patternProperties", {}).items():
        if matches(pattern, name):
            result.append(value)
    return result or [schema.get("additionalProperties", True)]


def _name(schemas: Sequence[Any]) -> str | None:
    """A name that is valid under all of `schemas`; None if none was found."""
    combined = {"allOf": list(schemas)}
    try:
        validator = jsonschema_rs.validator_for(
            combined, offline=True, pattern_options=pattern_options(combined)
        )
        names = islice(_candidates(schemas), _MAX_NAMES)
        return next((name for name in names if validator.is_valid(name)), None)
    except (ConstraintError, ValueError, RecursionError):  # an unsupported pattern
        return None


def _candidates(schemas: Sequence[Any]) -> Iterator[str]:
    """Names that satisfy `schemas`, negations not considered."""
    lists: list[list[str]] = []
    patterns: list[str] = []
    for schema in schemas:
        _collect(schema, lists, patterns)
    if lists:
        yield from (name for name in min(lists, key=len) if isinstance(name, str))
    elif len(distinct := dict.fromkeys(patterns)) <= _MAX_PATTERNS:
        yield from matching_texts([search_expression(pattern) for pattern in distinct])


def _collect(schema: Any, lists: list[list[str]], patterns: list[str]) -> None:
    """Appends the name lists and the patterns of `schema` to `lists` and `patterns`."""
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
    options = [part for part in schema.get("anyOf", ()) if part != {"enum": []}]
    if len(options) == 1:
        _collect(options[0], lists, patterns)
    negated = schema.get("not")
    if (
        isinstance(negated, dict)
        and negated.keys() <= {"allOf", "type"}
        and len(negated.get("allOf", ())) == 1
    ):
        [negated] = negated["allOf"]  # the form of a negated name in canonical schemas
    if isinstance(negated, dict):
        _collect(negated.get("not"), lists, patterns)


def search_expression(pattern: str) -> Expression:
    """The expression of all texts in which `pattern` matches somewhere. Raises `ConstraintError`
    for a pattern that is not regular."""
    has_start, has_end = pattern.startswith("^"), pattern.endswith("$")
    has_end = has_end and not pattern.endswith("\\$")
    inner = read_regex(pattern[has_start : len(pattern) - has_end], has_anchors=True)
    if inner[0] == "alt" or any(mask >> TEXT_START for _, mask in leaves(inner)):
        # The anchors are not those of the whole pattern.
        inner = read_regex(pattern, has_anchors=True)
        return without_anchors(sequence([_ANYTHING, inner, _ANYTHING]))
    return sequence([EMPTY if has_start else _ANYTHING, inner, EMPTY if has_end else _ANYTHING])


def matching_texts(expressions: Sequence[Expression]) -> Iterator[str]:
    """Texts of ASCII characters (`_LETTERS`) that match all `expressions`, the shortest first."""
    automata = [ByteGrammar({"": expression}) for expression in expressions]
    start = tuple(automaton.start_states[0] for automaton in automata)
    queue = deque([("", start)])
    seen = {start}
    while queue:
        text, states = queue.popleft()
        if text and _all_accept(automata, states):
            yield text
        for byte in _LETTERS:
            next_states = tuple(
                automaton.transitions[state].get(automaton.classes[byte], -1)
                for automaton, state in zip(automata, states, strict=True)
            )
            if -1 in next_states or len(seen) > _MAX_PREFIXES:
                continue
            if next_states not in seen or _all_accept(automata, next_states):
                seen.add(next_states)
                queue.append((text + chr(byte), next_states))


def _all_accept(automata: Sequence[ByteGrammar], states: Sequence[int]) -> bool:
    return all(
        automaton.completed_rule[state] >= 0
        for automaton, state in zip(automata, states, strict=True)
    )
