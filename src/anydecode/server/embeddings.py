"""`/v1/embeddings`: the mean of the last hidden states, of length 1.

A model made for generation gives such vectors as a by-product; they rank texts, but a model trained
for the purpose ranks them better.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.engine.embedding import MeanState
from anydecode.server.errors import ApiError
from anydecode.server.options import adapter_of, check_choices
from anydecode.server.prompts import prompt_list
from anydecode.server.protocol import EmbeddingRequest
from anydecode.server.service import Service


async def embed(service: Service, body: EmbeddingRequest, http: HttpRequest) -> Response:
    """One vector per input."""
    width = service.llm.model.spec.hidden_size
    if body.dimensions not in (None, width):
        raise ApiError(400, f"this model's vectors have {width} numbers", param="dimensions")
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
    run = service.joined(requests, state)
    async with run:
        await run.finished(http.receive)
    count = sum(len(request.prompt) for request in requests)
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _coded(decoder, body)}
                for index, decoder in enumerate(decoders)
            ],
            "model": service.settings.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def _coded(decoder: MeanState, body: EmbeddingRequest) -> Any:
    vector = decoder.vector()
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
