"""The endpoints `/v1/rerank` (the form of Jina and Cohere) and `/v1/score` (vLLM's form): the
relevance of texts to others.

A cross-encoder reads two texts together. An embedding model gives the cosine of the angle between
their embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.api.embedding import (
    check_instruction,
    cosine_similarity,
    cross_encoder,
    pair_template,
    pooling_of,
    ranked,
    relevance_decoder,
    token_limit,
)
from anydecode.server.embeddings import check_texts, embed_prompts, embedding_adapter, measure
from anydecode.server.errors import ApiError
from anydecode.server.protocol import RerankRequest, ScoreRequest
from anydecode.server.service import Service


async def rerank(service: Service, body: RerankRequest, http: HttpRequest) -> Response:
    """Order documents by their relevance to a query."""
    check_texts(len(body.documents), service.settings, "documents")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    if not documents:
        raise ApiError(400, "documents is empty; give at least one", param="documents")
    pairs = [(body.query, document) for document in documents]
    scores, count = await _relevances(service, body, pairs, http, has_roles=True)
    results = []
    for one in ranked(scores, body.top_n or None):
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if body.return_documents is not False:
            result["document"] = {"text": documents[one.index]}
        results.append(result)
    return JSONResponse(
        {
            "id": f"rerank-{uuid4().hex}",
            "model": body.model or service.settings.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "results": results,
        }
    )


async def score(service: Service, body: ScoreRequest, http: HttpRequest) -> Response:
    """Compute the relevance of pairs of texts."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not first or not second or len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; give as many of both, or"
            " one text_1 and at least one text_2",
            param="text_1",
        )
    check_texts(len(second), service.settings, "text_2")
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    scores, count = await _relevances(service, body, pairs, http, has_roles=False)
    return JSONResponse(
        {
            **service.head("list", "score", body.model),
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }
    )


async def _relevances(
    service: Service,
    body: RerankRequest | ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    http: HttpRequest,
    *,
    has_roles: bool,
) -> tuple[list[float], int]:
    """The relevance of pairs, and the number of tokens that were read.

    Args:
        service: The served model.
        body: The request.
        pairs: Pairs of texts.
        http: The request.
        has_roles: Whether the texts are queries and documents, before which the repository's
            prompts of these names are put.
    """
    llm = service.llm
    adapter = embedding_adapter(service, body.model)
    reranker = cross_encoder(llm.model)
    if reranker is not None:
        limit = token_limit(body.truncate_prompt_tokens, llm.max_length)
        encoded = await service.preparation.pair_tokens(
            http.scope["state"], pair_template(reranker), pairs, body.instruction, limit
        )
        judges = [relevance_decoder(reranker, types) for _, types in encoded]
        texts = [(tokens, judge) for (tokens, _), judge in zip(encoded, judges, strict=True)]
        count = await measure(service, texts, http, adapter)
        return [judge.score() for judge in judges], count
    check_instruction(body.instruction)
    vectors: dict[tuple[int, str], list[float]] = {}
    count = 0
    for side, role in enumerate(("query", "document")):
        texts_of_side = list(dict.fromkeys(pair[side] for pair in pairs))
        has_prompt = has_roles and role in pooling_of(llm.model).prompts
        found, num_tokens = await embed_prompts(
            service,
            texts_of_side,
            http,
            adapter=adapter,
            prompt_name=role if has_prompt else None,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        vectors |= {(side, text): vector for text, vector in zip(texts_of_side, found, strict=True)}
        count += num_tokens
    scores = [cosine_similarity(vectors[0, one], vectors[1, other]) for one, other in pairs]
    return scores, count
