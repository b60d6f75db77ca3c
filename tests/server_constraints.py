"""Constraints that requests name in `structured_outputs`, and checks of the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}},
    "required": ["a"],
    "additionalProperties": False,
}


TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
    "triggers": ["<f>"],
}


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"a"} and len(set(value["a"])) == len(value["a"])


#: By name: the field, and a check of the answer.
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA}, is_valid),
    "json text": ({"json": json.dumps(SCHEMA)}, is_valid),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[ab]{2,3}"}, lambda text: re.fullmatch("[ab]{2,3}", text)),
    "lark": ({"grammar": 'start: "x" | "yy"'}, lambda text: text in ("x", "yy")),
    "gbnf": ({"grammar": 'root ::= "x" | "yy"'}, lambda text: text in ("x", "yy")),
    "structural_tag": ({"structural_tag": TAG}, bool),
    "choice": ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
}
