"""The endpoint `/v1/constraints/validate`: whether a constraint can be compiled."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.errors import AnydecodeError
from anydecode.server.errors import ApiError, api_error
from anydecode.server.options import adapter_of
from anydecode.server.protocol import ConstraintRequest
from anydecode.server.service import Service
from anydecode.server.tools import constraint_factory
from anydecode.server.workers import LimitError


async def validate(service: Service, body: ConstraintRequest, http: HttpRequest) -> Response:
    """Whether the constraint of `body` can be compiled and how it would be enforced, or the reason
    why it cannot. Nothing is generated."""
    adapter_of(body.model, service.llm, service.settings)  # refuses other models
    make = constraint_factory(body.response_format, body.structured_outputs)
    if make is None:
        message = "no constraint is given: give structured_outputs or response_format"
        raise ApiError(400, message, param="structured_outputs")
    try:
        constraint = await service.preparation.constraint(http.scope["state"], make)
    except (AnydecodeError, LimitError) as error:
        return JSONResponse(_result(reason=api_error(error).message))
    return JSONResponse(_result(report=constraint.report().to_dict()))


def _result(*, report: dict[str, Any] | None = None, reason: str | None = None) -> dict[str, Any]:
    return {"valid": reason is None, "reason": reason, "constraint": report}
