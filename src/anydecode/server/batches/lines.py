"""The lines of a batch: requests, and their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from anydecode.server.bodies import check_size
from anydecode.server.errors import ApiError

#: Maximum number of lines of a file.
MAX_LINES = 50_000
#: The endpoints of a batch.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
#: Longest `custom_id`, in characters.
_MAX_ID = 512
_FIELDS = ("custom_id", "method", "url", "body")


def request_of(text: bytes) -> dict[str, Any]:
    """The request of a line. Raises `ApiError` if the line is not an object."""
    try:
        check_size(text)
        request = json.loads(text)
        json.dumps(
            request, ensure_ascii=False
        ).encode()  # no lone surrogates: errors quote the line
    except json.JSONDecodeError as error:
        message = f"the line is not valid JSON: {error.msg} at column {error.colno}"
        raise ApiError(400, message, code="invalid_json_line") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # no UTF-8, also when written again; nested too deep
        message = f"the line is not valid JSON: {type(error).__name__}"
        raise ApiError(400, message, code="invalid_json_line") from None
    if not isinstance(request, dict):
        message = "the line must be an object with custom_id, method, url and body"
        raise ApiError(400, message, code="invalid_json_line")
    return request


class LineCheck:
    """Checks the requests of one batch.

    Args:
        endpoint: The endpoint of the batch.
        max_body: Maximum size of a request, in bytes.
        check_model: Raises `ApiError` if a body names a model that is not served.
    """

    def __init__(
        self, endpoint: str, max_body: int, check_model: Callable[[dict[str, Any]], object]
    ) -> None:
        self._endpoint = endpoint
        self._max_body = max_body
        self._check_model = check_model
        self._lines: dict[str, int] = {}  # the number of the line, by custom id

    def error(self, number: int, text: bytes) -> tuple[Any, ApiError] | None:
        """The `custom_id` and the error of line `number`; None if it can be run."""
        custom_id = None
        try:
            if len(text) > self._max_body:
                message = f"the line has {len(text)} bytes; allowed are {self._max_body}"
                raise ApiError(413, message, code="body_too_large")
            request = request_of(text)
            custom_id = _custom_id(request)
            self._check(number, custom_id, request)
        except ApiError as error:
            return custom_id, error
        return None

    def _check(self, number: int, custom_id: str, request: dict[str, Any]) -> None:
        if (first := self._lines.setdefault(custom_id, number)) != number:
            message = (
                f"custom_id {custom_id!r} is also that of line {first}; give each line another"
            )
            raise ApiError(400, message, code="duplicate_custom_id", param="custom_id")
        if (method := request.get("method")) != "POST":
            given = "is missing" if method is None else f"is {method!r}"
            message = f'method {given}; it must be "POST"'
            raise ApiError(400, message, code="invalid_method", param="method")
        if (url := request.get("url")) != self._endpoint:
            given = "is missing" if url is None else f"is {url!r}"
            message = f"url {given}; it must be the endpoint of the batch, {self._endpoint}"
            raise ApiError(400, message, code="invalid_url", param="url")
        if unknown := sorted(request.keys() - set(_FIELDS)):
            message = f"unknown field {', '.join(unknown)}; a line has {', '.join(_FIELDS)}"
            raise ApiError(400, message, code="unknown_parameter", param=unknown[0])
        if not isinstance(body := request.get("body"), dict):
            message = "body must be an object, the request to the endpoint"
            raise ApiError(400, message, code="invalid_body", param="body")
        for name in ("stream", "background"):
            if body.get(name):
                message = f"{name} is not possible in a batch; leave it out"
                raise ApiError(400, message, code="unsupported_parameter", param=f"body.{name}")
        self._check_model(body)


def _custom_id(request: dict[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if isinstance(custom_id, str) and 0 < len(custom_id) <= _MAX_ID:
        return custom_id
    message = f"custom_id is missing or not a text of 1 to {_MAX_ID} characters"
    raise ApiError(400, message, code="missing_custom_id", param="custom_id")


def failed_lines(
    check: LineCheck, lines: list[tuple[int, bytes]]
) -> list[tuple[dict[str, Any], tuple[int, bytes]]]:
    """The errors of those of `lines` that cannot be run, each with the result of the line."""
    found = []
    for number, text in lines:
        if text.strip() and (failure := check.error(number, text)) is not None:
            custom_id, error = failure
            entry = {
                "code": error.code,
                "line": number,
                "message": error.message,
                "param": error.param,
            }
            found.append((entry, (number, result(custom_id, error=entry))))
    return found


def result(
    custom_id: Any, *, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> bytes:
    """The line of an output or error file."""
    entry = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(entry).encode() + b"\n"
