"""Answers of many values, which are built and encoded on another thread than the event loop's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

Result = TypeVar("Result")

#: Answers with more values are not built on the event loop. A value takes some microseconds.
MAX_VALUES = 1024
#: Lists and objects that are nested deeper are encoded at once, and so are so many elements of a
#: list without others.
MAX_DEPTH, MAX_ELEMENTS = 5, 1024

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def build(num_values: int, function: Callable[[], Result]) -> Result:
    """The result of `function`, which is called on another thread if it makes many values."""
    return await asyncio.to_thread(function) if num_values > MAX_VALUES else function()


async def json_response(num_values: int, function: Callable[[], dict[str, Any]]) -> Response:
    """The response with the result of `function` as JSON. One of about `num_values` many values is
    made on another thread and encoded in parts: while one is encoded, nothing else runs."""
    if num_values <= MAX_VALUES:
        return JSONResponse(function())
    content = await asyncio.to_thread(lambda: encode(function()))
    return Response(content, media_type="application/json")


def encode(value: Any, depth: int = 0) -> str:
    """`value` as JSON, encoded in parts."""
    if depth < MAX_DEPTH and isinstance(value, dict):
        members = (f"{_encode(name)}:{encode(one, depth + 1)}" for name, one in value.items())
        return "{" + ",".join(members) + "}"
    if depth < MAX_DEPTH and isinstance(value, list):
        if any(isinstance(one, dict | list) for one in value):
            parts = [encode(one, depth + 1) for one in value]
        else:
            starts = range(0, len(value), MAX_ELEMENTS)
            parts = [_encode(value[start : start + MAX_ELEMENTS])[1:-1] for start in starts]
        return f"[{','.join(parts)}]"
    return _encode(value)
