"""The endpoint `/v1/embeddings`: the mean of the last hidden states, normalised to length 1.

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
    hidden_size = service.llm.model.spec.hidden_size
    if body.dimensions not in (None, hidden_size):
        raise ApiError(
            400,
            f"dimensions is {body.dimensions}; this model's embeddings have {hidden_size}",
            param="dimensions",
        )
    texts = prompt_list(body.input)
    check_choices(len(texts), service.settings)
    state = http.scope["state"]
    options = {
        "max_tokens": 1,
        "adapter": adapter_of(body.model, service.llm, service.settings),
        "namespace": state["namespace"],
    }
    decoders = [MeanState() for _ in texts]
    runs = [
        await service.run([text], {**options, "decoder": decoder}, state)
        for text, decoder in zip(texts, decoders, strict=True)
    ]
    requests = [request for run in runs for request in run.requests]
    run = service.build_run(requests, state)
    async with run:
        await run.wait_for_generations(http.receive)
    count = sum(len(request.prompt) for request in requests)
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encode(decoder, body)}
                for index, decoder in enumerate(decoders)
            ],
            "model": service.settings.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def _encode(decoder: MeanState, body: EmbeddingRequest) -> Any:
    vector = decoder.vector()
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
