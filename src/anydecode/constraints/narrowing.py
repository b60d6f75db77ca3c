"""Parts of a schema that are easier to meet, for answers that keep breaking a rule.

What is left out is allowed by the schema but not needed. A narrowed schema is only a proposal: what
it lets through is validated against the whole schema.
"""

from __future__ import annotations

from typing import Any

from anydecode.constraints.canonical import canonical
from anydecode.constraints.relaxing import FORMATS, UNMASKED, is_pattern, without_assertions
from anydecode.constraints.witnesses import is_negation, witnesses

#: A pattern for values of formats that the mask engine does not know.
_SHAPES = {
    "idn-email": r"[a-z]{1,12}@[a-z]{1,12}\.com",
    "idn-hostname": r"[a-z]{1,12}\.com",
    "iri": r"https://[a-z]{1,12}\.com/[a-z]{0,12}",
    "iri-reference": r"/[a-z]{1,12}",
    "uri-reference": r"/[a-z]{1,12}",
    "uri-template": r"/[a-z]{1,12}",
    "json-pointer": r"/[a-z]{1,12}",
    "relative-json-pointer": r"[0-9]/[a-z]{1,12}",
    "regex": r"[a-z]{1,12}",
}


def narrowed(schema: Any, number: int, size: int) -> Any | None:
    """The `number`-th narrowed form of `schema`, or None if there is nothing to narrow. Even
    numbers keep every property, odd ones only those that are required; alternatives are chosen in
    turn."""
    if not isinstance(schema, dict):
        return None
    try:
        base = canonical(schema, size)
    except ValueError:
        return None
    return _node(base if base is not None else schema, number)


def _node(schema: Any, number: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key not in UNMASKED}
    if result.get("format") not in (None, *FORMATS):
        shape = _SHAPES.get(result.pop("format"))
        if shape is not None and "pattern" not in result:
            result["pattern"] = f"^{shape}$"
    if "pattern" in result and not is_pattern(result["pattern"]):
        looser = without_assertions(result.pop("pattern"))
        if looser is not None:
            result["pattern"] = looser
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(result.get(key), dict):
            result[key] = {name: _node(one, number) for name, one in result[key].items()}
    if isinstance(result.get("prefixItems"), list):
        result["prefixItems"] = [_node(one, number) for one in result["prefixItems"]]
    if isinstance(result.get("allOf"), list):
        parts = [_node(one, number) for one in result.pop("allOf") if not is_negation(one)]
        result |= {"allOf": parts} if parts else {}
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(result.get(key), dict):
            result[key] = _node(result[key], number)
    _choose(result, number)
    if not _bear_witness(schema, result, number):
        _close_object(result, number)
    _shorten_array(schema, result, number)
    return result


def _choose(result: dict[str, Any], number: int) -> None:
    """One alternative instead of several."""
    for key in ("oneOf", "anyOf"):
        options = [one for one in result.pop(key, ()) if one is not False]
        if options:
            chosen = _node(options[(number // 2) % len(options)], number)
            result["allOf"] = [*result.get("allOf", ()), chosen]


def _bear_witness(schema: dict[str, Any], result: dict[str, Any], number: int) -> bool:
    """Name the properties that negations ask for, and allow no others but required ones."""
    found = witnesses(schema, number)
    known = {
        name: one
        for name, one in result.get("properties", {}).items()
        if name in result.get("required", ())
    }
    for name, values in found:
        whole = {"allOf": values} if len(values) > 1 else values[0]
        try:
            simple = canonical(whole, len(str(whole)))
        except ValueError:
            return False
        if isinstance(simple, dict):
            simple.pop("$schema", None)
        known[name] = _node(whole if simple is None else simple, number)
    if found:
        result["properties"], result["additionalProperties"] = known, False
        result["required"] = [*dict.fromkeys((*result.get("required", ()), *known))]
        result.pop("patternProperties", None)
    return bool(found)


def _close_object(result: dict[str, Any], number: int) -> None:
    properties = result.get("properties")
    if result.get("type") != "object" and properties is None:
        return
    if "allOf" in result or "$ref" in result:
        return  # the other parts bring properties of their own
    required = result.get("required", [])
    others = result.get("additionalProperties", True)
    known = dict(properties or {})
    for name in required:
        known.setdefault(name, others)
    if number % 2:
        known = {name: one for name, one in known.items() if name in required}
    if len(known) >= result.get("minProperties", 0) and "patternProperties" not in result:
        result["properties"], result["additionalProperties"] = known, False


def _shorten_array(schema: dict[str, Any], result: dict[str, Any], number: int) -> None:
    contains = schema.get("contains")
    least = int(result.get("minItems", 0))
    if contains is not None and schema.get("minContains", 1):
        least = max(least, int(schema.get("minContains", 1)))
        parts = [_node(contains, number)]
        if "items" in result:
            parts.append(result["items"])
        result["items"] = {"allOf": parts} if len(parts) > 1 else parts[0]
        result["minItems"] = least
    if schema.get("uniqueItems") or contains is not None:
        result["maxItems"] = max(least, 1)
