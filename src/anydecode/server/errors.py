"""Errors as OpenAI's clients expect them: a status and one JSON shape."""

from __future__ import annotations

import json
from typing import Any

from anydecode.errors import (
    AnydecodeError,
    ConstraintError,
    EngineStoppedError,
    InvalidRequestError,
    OutOfMemoryError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer other than 200. `code` is machine-readable, `param` the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def to_json(self) -> bytes:
        """The same as ASCII JSON."""
        return json.dumps(self.to_dict()).encode()


def stopped(error: EngineStoppedError) -> str:
    """Why nothing is answered any more, without the fault's own words: the log has them."""
    fault = type(error.__cause__).__name__
    return f"the engine stopped ({fault}); the server's log has the details: restart the server"


def api_error(error: BaseException) -> ApiError:
    """What a client is told about `error`. Only what it can mend is told in words."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError(503, stopped(error), code="engine_stopped")
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "the text holds a lone surrogate, which is no character")
    if isinstance(error, AnydecodeError):
        message = " ".join(str(error).split())
        if isinstance(error, ConstraintError):
            return ApiError(400, message, code="constraint_error")
        if isinstance(error, OutOfMemoryError) or "the context holds" in message:
            return ApiError(400, message, code="context_length_exceeded")
        if isinstance(error, InvalidRequestError):
            return ApiError(400, message, code="invalid_value")
        return ApiError(400, message)
    return ApiError(
        500, "the server made a mistake; its log has the details", code="internal_error"
    )
