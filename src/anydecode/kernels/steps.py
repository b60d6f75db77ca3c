"""The steps of a program before they become C structs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Code = IntEnum(
    "Code",
    "EMBED TAP GATHER NORM QUANTISE LINEAR LORA ROPE_TABLE ROPE STORE ATTEND MERGE GATED ADD"
    " SCALE SOFTCAP COPY EXPERTS",
    start=0,
)

#: Places outside the workspace.
STREAM, LOGITS, NONE = -1, -2, -3


@dataclass(eq=False)
class Value:
    """A matrix with one row of `width` floats per row of the pass."""

    width: int
    place: int | None = None


@dataclass(eq=False)
class Step:
    """An op before its buffers are placed. `fields` are those of the C struct."""

    code: Code
    inputs: tuple[Value, ...]
    output: Value | None
    fields: dict[str, Any] = field(default_factory=dict)
    scratch: Value | None = None
    cache: str = ""  # "write" or "read": what it does to the keys and values
