"""The operations of a program, before they become C structs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Code = IntEnum(
    "Code",
    "EMBED CAPTURE GATHER NORM QUANTISE LINEAR LORA ROPE_TABLE ROPE STORE ATTEND MERGE GATED ADD"
    " SCALE SOFTCAP COPY EXPERTS LAYER_NORM ACTIVATE ADD_POSITION GATE_PARTS"
    " STORE_INPUTS CONVOLVE SCAN GROUPED_LINEAR SPLIT JOIN TOKEN_ROW CLAMP"
    " MULTIPLY CUT_OFF MATCH_MAGNITUDE MIX SPREAD SHIFT STORED BLOCK_CONVOLVE INDEX SELECT"
    " STORE_INDEX POOL HYPER COLLAPSE SOFTMAX TOKEN NGRAM",
    start=0,
)

#: Offsets that name buffers outside the workspace.
STREAM, LOGITS, NONE = -1, -2, -3


@dataclass(eq=False)
class Value:
    """A matrix with one row of `width` floats per row of the pass.

    `offset` is its offset in the workspace in floats per row, one of `STREAM`, `LOGITS` and `NONE`,
    or None before it is assigned.
    """

    width: int
    offset: int | None = None


@dataclass(eq=False)
class Step:
    """An op before its buffers are assigned. `fields` are those of the C struct `Op`."""

    code: Code
    inputs: tuple[Value, ...]
    output: Value | None
    fields: dict[str, Any] = field(default_factory=dict)
    scratch: Value | None = None
    cache: str = ""  # "write" or "read": its access to the key-value cache
