"""Embeddings and the endpoint `/v1/embeddings`.

How the states of a text are pooled is read from the model's repository. Embeddings of a generative
model can rank texts, but a model trained for embeddings ranks them better.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import Response

from anydecode.api.adapters import LoadedAdapter
from anydecode.api.embedding import embedding_decoder, pooling_of, text_start, token_limit
from anydecode.api.request import Request
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.server.errors import ApiError
from anydecode.server.large import json_response
from anydecode.server.options import adapter_of, check_prompt
from anydecode.server.prompts import prompt_list
from anydecode.server.protocol import EmbeddingRequest
from anydecode.server.service import Service
from anydecode.server.settings import Settings

#: Texts of one request that run at once, so that other requests wait for no more.
MAX_AT_ONCE = 64


async def embed(service: Service, body: EmbeddingRequest, http: HttpRequest) -> Response:
    """Compute one embedding per input."""
    prompts = prompt_list(body.input, "input")
    check_texts(len(prompts), service.settings, "input")
    vectors, count = await embed_prompts(
        service,
        prompts,
        http,
        adapter=embedding_adapter(service, body.model, body.task),
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        task=body.task,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )

    def answer() -> dict[str, Any]:
        entries = [
            {"object": "embedding", "index": index, "embedding": _encode(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        return {
            "data": entries,
            "object": "list",
            "model": body.model or service.settings.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **({} if body.user is None else {"anydecode": {"ignored": ["user"]}}),
        }

    return await json_response(sum(map(len, vectors)), answer)


async def embed_prompts(
    service: Service,
    prompts: Sequence[str | list[int]],
    http: HttpRequest,
    *,
    adapter: LoadedAdapter | None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    task: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> tuple[list[list[float]], int]:
    """The embeddings of texts or token ids, and the number of their tokens.

    Args:
        service: The served model.
        prompts: At least one text, or list of token ids.
        http: The request.
        adapter: The adapter that the request names, or that of the task.
        dimensions: The length of the embeddings that the request asks for.
        prompt_name: The prompt of the repository that is put before each text.
        task: See `EmbedOptions`.
        truncate_prompt_tokens: See `EmbedOptions`.

    Raises:
        ApiError: The model has embeddings of another length.
    """
    llm = service.llm
    pooling = pooling_of(llm.model)
    try:
        pooling.check_dimensions(dimensions, llm.model.spec.hidden_size)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param="dimensions") from None
    start = text_start(llm.model, prompt_name, task)
    limit = token_limit(truncate_prompt_tokens, llm.max_length)
    texts = [start + prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await service.preparation.text_tokens(http.scope["state"], texts, limit))
    tokens = [next(encoded) if isinstance(prompt, str) else prompt[:limit] for prompt in prompts]
    decoders = [embedding_decoder(llm.model, task) for _ in prompts]
    count = await measure(service, list(zip(tokens, decoders, strict=True)), http, adapter)
    return [decoder.vector(dimensions) for decoder in decoders], count


def embedding_adapter(
    service: Service, model: str | None, task: str | None = None
) -> LoadedAdapter | None:
    """The adapter that a request names, or that of a task of the model (see `EmbedOptions`).

    Raises:
        ApiError: The model or adapter does not exist.
    """
    llm = service.llm
    return llm.embedding_adapter(adapter_of(model, llm, service.settings), task)


async def measure(
    service: Service,
    texts: Sequence[tuple[list[int], Decoder]],
    http: HttpRequest,
    adapter: LoadedAdapter | None,
) -> int:
    """Run decoders that generate nothing, one per text. Returns the number of tokens.

    Args:
        service: The served model.
        texts: The tokens of each text, and its decoder.
        http: The request.
        adapter: The adapter of all texts, also if its name is given to another one meanwhile.
    """
    llm, state = service.llm, http.scope["state"]

    def make_requests(part: Sequence[tuple[list[int], Decoder]]) -> list[Request]:
        requests = []
        for tokens, decoder in part:
            prompt = llm.encode(tokens)
            check_prompt(prompt, service.settings)
            requests.append(llm.measurement(decoder, prompt, adapter, state["namespace"]))
        return requests

    counts: list[Callable[[], None]] = []
    for start in range(0, len(texts), MAX_AT_ONCE):
        requests = await asyncio.to_thread(make_requests, texts[start : start + MAX_AT_ONCE])
        run = service.build_run(requests, state)
        async with run:
            await run.wait_for_generations(http.receive)
        counts.append(state.pop("count"))
    num_tokens = sum(len(tokens) for tokens, _ in texts)

    def count() -> None:
        for one in counts:
            one()
        state["facts"]["prompt_tokens"] = num_tokens

    state["count"] = count
    return num_tokens


def check_texts(count: int, settings: Settings, param: str) -> None:
    """Raise `ApiError` if one request has more texts or pairs than the server allows."""
    if count > settings.max_texts:
        message = f"{param} has {count} texts; this server allows {settings.max_texts} per request"
        raise ApiError(400, message, param=param)


def _encode(vector: list[float], body: EmbeddingRequest) -> Any:
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
