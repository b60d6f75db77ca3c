"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from anydecode.server.errors import ApiError
from anydecode.server.ollama import embeddings, generate
from anydecode.server.ollama.models import ModelList
from anydecode.server.ollama.prompts import served_model
from anydecode.server.ollama.protocol import (
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from anydecode.server.service import Service
from anydecode.version import __version__

#: The version of Ollama whose API this one follows; clients compare it with what they need.
API_VERSION = "0.12.6"
#: Endpoints that would change which models there are.
_MANAGEMENT = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}


def add_ollama_api(app: FastAPI, service: Service, errors: dict[int | str, Any]) -> None:
    """Add the endpoints; `errors` describes their error responses."""
    _add_generation(app, service, errors)
    _add_models(app, service, errors)


def _add_generation(app: FastAPI, service: Service, errors: dict[int | str, Any]) -> None:
    @app.post("/api/chat", responses=errors)
    async def ollama_chat(body: OllamaChatRequest, http: Request) -> Response:
        """Generate the next message of a conversation."""
        return await generate.chat(service, body, http)

    @app.post("/api/generate", responses=errors)
    async def ollama_generate(body: GenerateRequest, http: Request) -> Response:
        """Answer a prompt."""
        return await generate.generate(service, body, http)

    @app.post("/api/embed", responses=errors)
    async def ollama_embed(body: EmbedRequest, http: Request) -> Response:
        """Compute one embedding per input."""
        return await embeddings.embed(service, body, http)

    @app.post("/api/embeddings", responses=errors)
    async def ollama_embeddings(body: EmbeddingsRequest, http: Request) -> Response:
        """Compute the embedding of one text."""
        return await embeddings.embed_one(service, body, http)


def _add_models(app: FastAPI, service: Service, errors: dict[int | str, Any]) -> None:
    models = ModelList(service)

    @app.get("/api/tags", responses={401: errors[401]})
    async def ollama_tags() -> Response:
        """List the model and its adapters."""
        return JSONResponse(models.tags())

    @app.get("/api/ps", responses={401: errors[401]})
    async def ollama_ps() -> Response:
        """List the models that are loaded."""
        return JSONResponse(models.running())

    @app.post("/api/show", responses=errors)
    async def ollama_show(body: ShowRequest, http: Request) -> Response:
        """Describe the model or one adapter."""
        served_model(body.model or body.name, service)
        return JSONResponse(await asyncio.to_thread(models.show))

    @app.get("/api/version", responses={401: errors[401]})
    async def ollama_version() -> Response:
        """The version of Ollama's API, and of this server."""
        return JSONResponse({"version": API_VERSION, "anydecode": __version__})

    for action, method in _MANAGEMENT.items():

        @app.api_route(f"/api/{action}", methods=[method], include_in_schema=False)
        async def refuse(http: Request) -> Response:
            """Refuse to change which models there are."""
            path = http.scope["path"]
            raise ApiError(
                501, f"{path} is not supported: the server serves the model it was started with"
            )
