"""Routes of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from anydecode.server.batches.api import BatchesApi
from anydecode.server.batches.protocol import BatchRequest
from anydecode.server.database import Database
from anydecode.server.models import ServedModels

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def add_files_api(
    app: FastAPI,
    models: ServedModels,
    database: Database | None,
    check_capacity: Callable[[], object],
    errors: dict[int | str, dict[str, Any]],
) -> BatchesApi:
    """Add the endpoints of files and batches.

    Args:
        app: The application, which also runs the lines of batches.
        models: The served models.
        database: The database of the files and batches; None if nothing is stored.
        check_capacity: Raises `ApiError` if the server has no room for another request.
        errors: The descriptions of the errors.
    """
    api = BatchesApi(
        app,
        models.settings,
        models.metrics,
        database,
        check_model=lambda body: models.find(_name(body)),
        check_capacity=check_capacity,
    )
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"

    @app.post("/v1/files", responses=errors, openapi_extra=_FORM)
    async def upload_file(http: Request) -> Response:
        """Upload a file with the requests of a batch."""
        return await api.upload(http)

    @app.get("/v1/files", responses=errors)
    async def files(
        http: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List the files."""
        return await api.files(http, after, limit, order, purpose)

    @app.get(file, responses=errors)
    async def file_object(file_id: str, http: Request) -> Response:
        """Describe a file."""
        return await api.file(file_id, http)

    @app.get(
        f"{file}/content",
        responses={**errors, 200: {"content": {"application/octet-stream": {}}}},
    )
    async def file_content(file_id: str, http: Request) -> Response:
        """Return the content of a file."""
        return await api.content(file_id, http)

    @app.delete(file, responses=errors)
    async def delete_file(file_id: str, http: Request) -> Response:
        """Delete a file."""
        return await api.delete(file_id, http)

    @app.post("/v1/batches", responses=errors)
    async def create_batch(body: BatchRequest, http: Request) -> Response:
        """Run the requests of a file."""
        return await api.create(body, http)

    @app.get("/v1/batches", responses=errors)
    async def batches(
        http: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Response:
        """List the batches."""
        return await api.batches(http, after, limit)

    @app.get(batch, responses=errors)
    async def batch_object(batch_id: str, http: Request) -> Response:
        """Describe a batch."""
        return await api.batch(batch_id, http)

    @app.post(f"{batch}/cancel", responses=errors)
    async def cancel_batch(batch_id: str, http: Request) -> Response:
        """Cancel a batch."""
        return await api.cancel(batch_id, http)

    return api


def _name(body: dict[str, Any]) -> str | None:
    """The model that a body names, if it is a text."""
    name = body.get("model")
    return name if isinstance(name, str) else None
