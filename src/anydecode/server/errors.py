"""Error responses as OpenAI clients expect them: a status and one JSON object."""

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
    """An error response. `code` is machine-readable; `param` names the invalid field."""

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
        """The error object as ASCII JSON."""
        return json.dumps(self.to_dict()).encode()


def stopped_message(error: EngineStoppedError) -> str:
    """The message for requests to a stopped engine: the fault's type, without its text, which only
    the log contains."""
    fault = type(error.__cause__).__name__
    return f"the engine stopped ({fault}); see the server's log for details and restart the server"


def api_error(error: BaseException) -> ApiError:
    """The error response for `error`. Only errors that the client can fix include their text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError(503, stopped_message(error), code="engine_stopped")
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "the text contains a lone surrogate, which is not a valid character")
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
        500, "internal server error; see the server's log for details", code="internal_error"
    )
