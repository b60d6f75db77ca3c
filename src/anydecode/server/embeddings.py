"""Embeddings and the endpoint `/v1/embeddings`: the mean of the last hidden states, normalised to
length 1.

Embeddings of a generative model can rank texts, but a model trained for embeddings ranks them
better.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.embedding import MeanState
from anydecode.server.errors import ApiError
from anydecode.server.options import adapter_of, check_choices
from anydecode.server.prompts import prompt_list
from anydecode.server.protocol import EmbeddingRequest
from anydecode.server.service import Service


async def embed(service: Service, body: EmbeddingRequest, http: HttpRequest) -> Response:
    """Compute one embedding per input."""
    vectors, count = await embed_prompts(
        service, prompt_list(body.input), http, model=body.model, dimensions=body.dimensions
    )
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encode(vector, body)}
                for index, vector in enumerate(vectors)
            ],
            "model": service.settings.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


async def embed_prompts(
    service: Service,
    prompts: list[str | list[int]],
    http: HttpRequest,
    *,
    model: str | None,
    dimensions: int | None,
) -> tuple[list[list[float]], int]:
    """The embeddings of texts or token ids, and the number of their tokens.

    Args:
        service: The served model.
        prompts: At least one text, or list of token ids.
        http: The request.
        model: The model or adapter that the request names.
        dimensions: The length of the embeddings that the request asks for.

    Raises:
        ApiError: The model does not exist, or has embeddings of another length.
    """
    hidden_size = service.llm.model.spec.hidden_size
    if dimensions not in (None, hidden_size):
        raise ApiError(
            400,
            f"dimensions is {dimensions}; this model's embeddings have {hidden_size}",
            param="dimensions",
        )
    check_choices(len(prompts), service.settings)
    state = http.scope["state"]
    options = {
        "max_tokens": 1,
        "adapter": adapter_of(model, service.llm, service.settings),
        "namespace": state["namespace"],
    }
    decoders = [MeanState() for _ in prompts]
    runs = [
        await service.run([prompt], {**options, "decoder": decoder}, state)
        for prompt, decoder in zip(prompts, decoders, strict=True)
    ]
    requests = [request for run in runs for request in run.requests]
    run = service.build_run(requests, state)
    async with run:
        await run.wait_for_generations(http.receive)
    return [one.vector() for one in decoders], sum(len(one.prompt) for one in requests)


def _encode(vector: list[float], body: EmbeddingRequest) -> Any:
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
