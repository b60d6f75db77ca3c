"""The endpoints `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.server.embeddings import check_texts, embed_prompts, embedding_adapter
from anydecode.server.large import json_response
from anydecode.server.ollama.prompts import ignored_names, served_model
from anydecode.server.ollama.protocol import EmbeddingsRequest, EmbedRequest
from anydecode.server.service import Service


async def embed(service: Service, body: EmbedRequest, http: HttpRequest) -> Response:
    """Compute one embedding per input."""
    start = perf_counter()
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
    check_texts(len(texts), service.settings, "input")
    vectors, count = await _vectors(service, body, list(texts), http)
    fields: dict[str, Any] = {
        "model": body.model or service.settings.name,
        "total_duration": round((perf_counter() - start) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": count,
    }
    if names := sorted(ignored_names(body, service)):
        fields["anydecode"] = {"ignored": names}
    count = sum(map(len, vectors))
    return await json_response(count, lambda: {"embeddings": vectors, **fields})


async def embed_one(service: Service, body: EmbeddingsRequest, http: HttpRequest) -> Response:
    """Compute the embedding of one text; without text, an empty one."""
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(service, body, texts, http)
    return JSONResponse({"embedding": vectors[0] if vectors else []})


async def _vectors(
    service: Service,
    body: EmbedRequest | EmbeddingsRequest,
    texts: list[str],
    http: HttpRequest,
) -> tuple[list[list[float]], int]:
    model = served_model(body.model, service)
    if not texts:
        return [], 0
    options = body if isinstance(body, EmbedRequest) else None
    return await embed_prompts(
        service,
        texts,
        http,
        adapter=embedding_adapter(service, model),
        dimensions=None if options is None else options.dimensions,
        truncate_prompt_tokens=-1 if options is not None and options.truncate else None,
    )
