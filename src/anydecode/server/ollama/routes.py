"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from anydecode.server.errors import ApiError
from anydecode.server.models import ServedModels
from anydecode.server.ollama import embeddings, generate
from anydecode.server.ollama.models import ModelList, show
from anydecode.server.ollama.prompts import is_zero, known_name
from anydecode.server.ollama.protocol import (
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaBody,
    OllamaChatRequest,
    ShowRequest,
)
from anydecode.server.service import Service
from anydecode.version import __version__

#: The version of Ollama whose API this one follows; clients compare it with what they need.
API_VERSION = "0.12.6"
#: Endpoints that would change which models there are.
_MANAGEMENT = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}


def add_ollama_api(app: FastAPI, models: ServedModels, errors: dict[int | str, Any]) -> None:
    """Add the endpoints; `errors` describes their error responses."""
    _add_generation(app, models, errors)
    _add_models(app, models, errors)


def _add_generation(app: FastAPI, models: ServedModels, errors: dict[int | str, Any]) -> None:
    streamed = {**errors, 200: {"content": {"application/x-ndjson": {}}}}

    @app.post("/api/chat", responses=streamed)
    async def ollama_chat(body: OllamaChatRequest, http: Request) -> Response:
        """Generate the next message of a conversation."""
        if generate.is_unloading(body):
            return _unload(models, body)
        return await generate.chat(await _service(models, body, http), body, http)

    @app.post("/api/generate", responses=streamed)
    async def ollama_generate(body: GenerateRequest, http: Request) -> Response:
        """Answer a prompt."""
        if generate.is_unloading(body):
            return _unload(models, body)
        return await generate.generate(await _service(models, body, http), body, http)

    @app.post("/api/embed", responses=errors)
    async def ollama_embed(body: EmbedRequest, http: Request) -> Response:
        """Compute one embedding per input."""
        return await embeddings.embed(await _service(models, body, http), body, http)

    @app.post("/api/embeddings", responses=errors)
    async def ollama_embeddings(body: EmbeddingsRequest, http: Request) -> Response:
        """Compute the embedding of one text."""
        return await embeddings.embed_one(await _service(models, body, http), body, http)


def _add_models(app: FastAPI, models: ServedModels, errors: dict[int | str, Any]) -> None:
    described = ModelList(models)

    @app.get("/api/tags", responses={401: errors[401]})
    async def ollama_tags() -> Response:
        """List the models and their adapters."""
        return JSONResponse(described.tags())

    @app.get("/api/ps", responses={401: errors[401]})
    async def ollama_ps() -> Response:
        """List the models that are loaded."""
        return JSONResponse(described.running())

    @app.post("/api/show", responses=errors)
    async def ollama_show(body: ShowRequest, http: Request) -> Response:
        """Describe a model or an adapter."""
        body.model = body.model or body.name
        service = await _service(models, body, http)
        return JSONResponse(await asyncio.to_thread(show, service))

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
                501, f"{path} is not supported: the server serves the models it was started with"
            )


async def _service(models: ServedModels, body: OllamaBody, http: Request) -> Service:
    """The service of the model that a request names, which may ask to unload it afterwards."""
    name = known_name(body.model, models.available)
    service = await models.use(name, http.scope["state"])
    if is_zero(getattr(body, "keep_alive", None)):
        models.unload(name)
    return service


def _unload(models: ServedModels, body: OllamaChatRequest | GenerateRequest) -> Response:
    name = known_name(body.model, models.available)
    models.unload(name)
    return generate.unloaded(body, models.find(name).model.name)
