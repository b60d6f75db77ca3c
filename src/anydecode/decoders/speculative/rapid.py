"""RAPID: the draft model reads chunks retrieved from a long prompt (Chen et al., "Long-Context
Inference with Retrieval-Augmented Speculative Decoding", arXiv:2502.20330)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from math import log, sqrt
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    RejectionSampling,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import (
    DRAFT,
    fit_vocab,
    sampled_chain,
    truncate_to_prefix,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence


def retrieve_chunks(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The chunks of a prompt that are most similar to its end.

    Similarity is the cosine of token counts weighted by rarity.

    Args:
        prompt: The prompt's tokens.
        chunk: Tokens per chunk.
        count: Number of chunks to retrieve.
        query: Number of last tokens that the chunks are compared with.

    Returns:
        The retrieved chunks in the prompt's order, then the last `query` tokens.
    """
    body, question = prompt[: max(0, len(prompt) - query)], prompt[-query:]
    chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)]
    presence = Counter(token for part in chunks for token in set(part))
    rarity = {token: log((1 + len(chunks)) / (0.5 + n)) for token, n in presence.items()}
    question_counts = Counter(question)

    def similarity(part: list[int]) -> float:
        weights = {token: n * rarity[token] for token, n in Counter(part).items()}
        norm = sqrt(sum(weight * weight for weight in weights.values()))
        shared = sum(
            w * n * rarity[t] for t, w in weights.items() if (n := question_counts.get(t, 0))
        )
        return shared / norm if norm else 0.0

    best = sorted(
        range(len(chunks)), key=lambda position: (-similarity(chunks[position]), position)
    )[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question


def draft_after(
    sequence: Sequence,
    text: list[int],
    size: int,
    distributions: list[np.ndarray] | None = None,
) -> Generator[DecoderAction, Any, list[int]]:
    """Draft `size` tokens after `text`, which is the draft model's own, sampled with the noise of
    their positions in the target's text. The distribution of each draft is appended to
    `distributions`, float64 `[vocab_size]`."""
    kv_cache = sequence.kv_cache(DRAFT)
    truncate_to_prefix(kv_cache, text)
    sampler = sequence.sampler.fork()
    drafts: list[int] = []
    for _ in range(size):
        scores = yield sequence.score((text + drafts)[kv_cache.length :], runner=DRAFT)
        row = fit_vocab(sequence, scores.row(-1))
        token = sequence.sample(sampler, row, sequence.length + len(drafts))
        if distributions is not None:
            distributions.append(sampler.distribution(row).dense(len(row)))
        sampler.advance(token)
        drafts.append(token)
    return drafts


class RetrievalDrafter(Drafter):
    """Drafts with a draft model that reads `count` retrieved chunks if the prompt is longer."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self, chunk: int, count: int, query: int, with_probabilities: bool = False
    ) -> None:
        if min(chunk, count, query) < 1:
            raise InvalidRequestError("rapid needs chunk, count and query >= 1")
        self.chunk = chunk
        self.count = count
        self.query = query
        self.with_probabilities = with_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _RetrievalSession(sequence, self)


class _RetrievalSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: RetrievalDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.prompt = retrieve_chunks(sequence.prompt, drafter.chunk, drafter.count, drafter.query)

    def propose(self, size: int) -> Proposal:
        text = self.prompt + self.sequence.tokens
        distributions: list[np.ndarray] | None = [] if self.drafter.with_probabilities else None
        drafts = yield from draft_after(self.sequence, text, size, distributions)
        return sampled_chain(drafts, distributions)


@register(
    Card(
        "rapid",
        "speculative",
        paper="RAPID (arXiv:2502.20330), its retrieval-augmented drafter",
        exactness="token-exact",
        summary="The draft model reads a short prompt of retrieved chunks instead of the long one.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the target is not shifted towards the drafter, which makes the paper's method lossy",
            "chunks are retrieved by weighted token overlap, not by an embedding model",
            "8 chunks of 64 tokens and the prompt's last 128; the paper takes chunks of 512 above"
            " a similarity of 0.3, between 4096 tokens and 1/24 of the prompt",
            "verified token-exactly with shared noise",
        ),
        remote={
            "size": Range(0, 64),
            "chunk": Range(1, 4096),
            "count": Range(1, 256),
            "query": Range(1, 4096),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def rapid(
    size: int = 10,
    chunk: int = 64,
    count: int = 8,
    query: int = 128,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """RAPID: drafting from retrieved chunks.

    Args:
        size: Number of drafts per round.
        chunk: Tokens per chunk.
        count: Number of retrieved chunks.
        query: Number of last prompt tokens that the chunks are compared with.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    rule = acceptance_rule(acceptance)
    drafter = RetrievalDrafter(chunk, count, query, isinstance(rule, RejectionSampling))
    return Speculative(drafter, size, rule)
