"""Request bodies, straight from bytes into their models."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from anydecode.server.errors import ApiError


class JsonRoute(APIRoute):
    """Where an endpoint takes `body`, a pydantic model, and `http`, the request, FastAPI describes
    it as any other; but its general way from a body to arguments, which asks for forms, files and
    dependencies too, would cost a tenth of a millisecond a request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Parse the body and call the endpoint. Raises `RequestValidationError` and `ApiError`."""
        endpoint: Callable[..., Any] = self.endpoint
        model = get_type_hints(endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(http: Request) -> Response:
            said = await http.body()
            if not _is_json(http.headers.get("content-type", "")):
                # Pages of other origins may send anything else without being asked.
                raise ApiError(400, "the body: send it as application/json", code="invalid_body")
            try:
                body = model.model_validate_json(said)
            except ValidationError as error:
                wrong = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                raise RequestValidationError(wrong) from error
            answer: Response = await endpoint(body, http)
            return answer

        return handle


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
