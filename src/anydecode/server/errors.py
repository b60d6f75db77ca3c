"""Error responses as the clients of each API expect them: a status and one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from anydecode.errors import (
    AdapterNotFoundError,
    AnydecodeError,
    ConstraintError,
    ContextLengthError,
    EngineStoppedError,
    FleetError,
    InvalidRequestError,
    OutOfMemoryError,
    RewardError,
    one_line,
)
from anydecode.sampling.options import SamplingOptions

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

#: Largest length of an error's message and of its `param`, in characters.
MAX_MESSAGE, MAX_PARAM = 600, 120


class ApiError(Exception):
    """An error response. `code` is machine-readable; `param` names the invalid field. Both texts
    are cut and put on one line, since they may quote the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = one_line(message, MAX_MESSAGE)
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = None if param is None else one_line(param, MAX_PARAM)
        self.headers = headers or {}

    def to_dict(self, path: str = "") -> dict[str, Any]:
        """The error object of the API to which the endpoint `path` belongs; OpenAI's by default."""
        for prefix, error_object in _ERROR_OBJECTS.items():
            if path.startswith(prefix):
                return error_object(self)
        return _openai_error(self)

    def to_json(self, path: str = "") -> bytes:
        """The error object as ASCII JSON."""
        return json.dumps(self.to_dict(path)).encode()


def _openai_error(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def _anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    fields: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param == "thread":  # the client's tool runner then sends all messages
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": fields}


def _ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


#: The error object of an API, by the start of its paths.
_ERROR_OBJECTS: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/messages": _anthropic_error,
    "/api/": _ollama_error,
}


def too_large_headers(limit: int) -> ApiError:
    """The error for headers of more than `limit` bytes."""
    message = f"the request's headers are larger than {limit} bytes"
    return ApiError(431, message, code="headers_too_large", headers={"connection": "close"})


def stopped_message(error: EngineStoppedError) -> str:
    """The message for requests to a stopped engine: the fault's type, without its text, which only
    the log contains."""
    fault = type(error.__cause__).__name__
    return f"the engine stopped ({fault}); see the server's log for details and restart the server"


#: The code of an error that the client can fix, by its class: the first that it belongs to.
_CODES: tuple[tuple[type[AnydecodeError], str], ...] = (
    (ConstraintError, "constraint_error"),
    (RewardError, "reward_error"),
    (OutOfMemoryError, "context_length_exceeded"),
    (ContextLengthError, "context_length_exceeded"),
    (InvalidRequestError, "invalid_value"),
)


def _code(error: AnydecodeError) -> str | None:
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)


#: Fields that messages of the engine's errors begin with.
_FIELDS = SamplingOptions.__annotations__.keys() | {
    "decoder",
    "first_finish",
    "negative_prompt",
    "resume",
    "segment",
}


def _field(message: str) -> str | None:
    """The field that the message of an error begins with, if it does."""
    name = message.partition(" ")[0].rstrip(":")
    return name if name in _FIELDS else None


def api_error(error: BaseException) -> ApiError:
    """The error response for `error`. Only errors that the client can fix include their text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError(503, stopped_message(error), code="engine_stopped")
    if isinstance(error, FleetError):
        headers = {"retry-after": "5"}
        return ApiError(503, str(error), code="fleet_unavailable", headers=headers)
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "the text contains a lone surrogate, which is not a valid character")
    if isinstance(error, AdapterNotFoundError):  # unloaded while the request was prepared
        return ApiError(404, str(error), code="model_not_found", param="model")
    if isinstance(error, AnydecodeError):
        return ApiError(400, str(error), code=_code(error), param=_field(str(error)))
    return ApiError(
        500, "internal server error; see the server's log for details", code="internal_error"
    )
