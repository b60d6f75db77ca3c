"""Objects with hundreds of optional properties, in the form in which a mask is computed fast.

llguidance tries every optional property behind each of the others, and gives up beyond some
hundred. Written as patterns of names, one for each distinct schema of a value, they are as many
rules as there are such schemas. The names may then come in any order, and more than once.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from itertools import accumulate
from typing import Any
from urllib.parse import unquote

from anydecode.constraints.json.relaxing import ANNOTATIONS, pointer_part, subschemas
from anydecode.errors import ConstraintError

#: Maximum number of optional properties that an object lists. llguidance has about four items for
#: each of them, of at most 2,000.
MAX_OPTIONAL = 400


def is_wide(node: dict[str, Any]) -> bool:
    """Whether an object lists more than `MAX_OPTIONAL` optional properties."""
    return len(_optional(node)) > MAX_OPTIONAL


def with_grouped_properties(schema: Any) -> Any:
    """`schema` with the optional properties of wide objects as `patternProperties`, one for each
    distinct schema. Properties to which a reference points stay.

    Raises:
        ConstraintError: They have more than `MAX_OPTIONAL` distinct schemas.
    """
    if not any(is_wide(node) for _, node in subschemas(schema)):
        return schema
    result = deepcopy(schema)
    nodes = list(subschemas(result))
    referenced = {
        part
        for _, node in nodes
        if isinstance(node.get("$ref"), str)
        for part in accumulate(unquote(node["$ref"]).split("/"), "{}/{}".format)
    }
    for path, node in nodes:
        if is_wide(node):
            _group(path, node, referenced)
    return result


def _optional(node: dict[str, Any]) -> list[str]:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return []
    needed = frozenset(required if isinstance(required, list) else ())
    return [name for name in properties if name not in needed]


def _group(path: str, node: dict[str, Any], referenced: set[str]) -> None:
    """Groups the optional properties of the object `node` at `path`, in place."""
    listed = dict(node["properties"])
    groups: dict[str, list[str]] = {}
    grouped: set[str] = set()
    if not node.get("patternProperties"):  # the patterns of an object must not overlap
        for name in _optional(node):
            if f"{path}/properties/{pointer_part(name)}" not in referenced:
                groups.setdefault(_meaning(listed[name]), []).append(name)
                grouped.add(name)
    patterns = {
        f"^({'|'.join(map(re.escape, names))})$": listed[names[0]] for names in groups.values()
    }
    kept = {name: listed[name] for name in listed if name not in grouped}
    num_kept = len(_optional(node)) - len(grouped)
    if len(patterns) + num_kept > MAX_OPTIONAL:
        raise ConstraintError(
            f"the object at {path} has more than {MAX_OPTIONAL} optional properties with different"
            " schemas: a mask cannot be computed for it"
        )
    if patterns:
        node["properties"], node["patternProperties"] = kept, patterns


def _meaning(schema: Any) -> str:
    """A text that is the same for schemas that differ only in their annotations."""
    copy = deepcopy(schema)
    for _, node in subschemas(copy):
        for key in ANNOTATIONS & node.keys():
            del node[key]
    return json.dumps(copy, sort_keys=True)
