"""Request bodies, parsed from bytes directly into their pydantic models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from anydecode.server.errors import ApiError
from anydecode.server.field_errors import invalid_body

#: Largest numbers of values, of members of objects, and of lists and objects in a body. Parsing
#: delays all other requests: each of these numbers takes some hundredths of a second.
MAX_VALUES, MAX_MEMBERS, MAX_CONTAINERS = 1 << 18, 1 << 14, 1 << 13
#: Bodies of more bytes are checked on another thread, in parts of this size.
_PART = 1 << 16


class JsonRoute(APIRoute):
    """A route that parses a JSON body itself, for endpoints with the arguments `body` (a pydantic
    model) and `http` (the request).

    FastAPI still describes the endpoint in the OpenAPI schema. Its general argument handling, which
    also covers forms, files and dependencies, would cost 0.1 ms per request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler: parses the body and calls the endpoint. The handler raises
        `ApiError`, and `RequestValidationError` for parameters in the address."""
        endpoint: Callable[..., Any] = self.endpoint
        model = get_type_hints(endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(http: Request) -> Response:
            content = await http.body()
            if "origin" in http.headers and not _is_json(http.headers.get("content-type", "")):
                # Browsers let pages of other origins send other types without a CORS preflight, but
                # they name the origin. curl sends JSON as a form unless it is told otherwise.
                raise ApiError(400, "the body: send it as application/json", code="invalid_body")
            if len(content) > _PART:
                await asyncio.to_thread(check_size, content)
            elif len(content) > MAX_CONTAINERS:  # else it cannot have so many of anything
                check_size(content)
            try:
                body = model.model_validate_json(content)
            except ValidationError as error:
                raise invalid_body(error.errors(include_url=False)) from error
            answer: Response = await endpoint(body, http)
            return answer

        return handle


def check_size(content: bytes) -> None:
    """Raises `ApiError` if a JSON text has too many values. The interpreter lock is held for one
    part of the text at a time."""
    num_values, num_members, num_containers = 1, 0, 0
    num_quotes = start = 0
    while start < len(content):
        part = content[start : start + _PART]
        num_escapes = len(part) - len(part.rstrip(b"\\"))
        if num_escapes % 2 and len(part) > 1:  # the escaped character is in the next part
            part = part[:-1]
        start += len(part)
        if b"\\" in part:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"")
        outside = _outside_strings(part, num_quotes % 2 == 1)
        num_quotes += part.count(b'"')
        num_values += outside.count(b",")
        num_members += outside.count(b":")
        num_containers += outside.count(b"{") + outside.count(b"[")
        if num_values > MAX_VALUES or num_members > MAX_MEMBERS or num_containers > MAX_CONTAINERS:
            raise ApiError(
                400,
                f"the body has at least {num_values} values, {num_members} members of objects and"
                f" {num_containers} lists and objects; allowed are {MAX_VALUES}, {MAX_MEMBERS} and"
                f" {MAX_CONTAINERS}: send several requests, or texts instead of token ids",
                code="invalid_body",
            )


def _outside_strings(part: bytes, is_inside: bool) -> bytes:
    """A part of a JSON text, without escapes, outside its strings. `is_inside`: whether it begins
    inside one."""
    if b'"' not in part:
        return b"" if is_inside else part
    text = np.frombuffer(part, np.uint8)
    quotes = np.cumsum(text == ord('"'), dtype=np.uint8) + np.uint8(is_inside)
    return text[quotes & 1 == 0].tobytes()


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
