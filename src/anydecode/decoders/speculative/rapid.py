"""RAPID: the draft model reads chunks retrieved from a long prompt (Chen et al., "Long-Context
Inference with Retrieval-Augmented Speculative Decoding", arXiv:2502.20330).

Chunks are ranked by Okapi BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework:
BM25 and Beyond", 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from math import log
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    CHAIN_NOISE,
    RejectionSampling,
    acceptance_rule,
)
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import truncate_to_prefix
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence

#: The strongest shift, whose powers of e are finite.
MAX_ETA = 100
#: Saturation of term counts and weight of the length in BM25, as usual.
_K1, _B = 1.2, 0.75


def retrieve_chunks(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The chunks of a prompt that rank highest for its end, by Okapi BM25 with tokens as terms.

    Args:
        prompt: The prompt's tokens.
        chunk: Tokens per chunk.
        count: Number of chunks to retrieve.
        query: Number of last tokens that the chunks are ranked for.

    Returns:
        The retrieved chunks in the prompt's order, then the last `query` tokens.
    """
    body, question = prompt[: max(0, len(prompt) - query)], prompt[-query:]
    chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)]
    presence = Counter(token for part in chunks for token in set(part))
    question_counts = Counter(question)
    mean_length = len(body) / max(1, len(chunks))

    def relevance(part: list[int]) -> float:
        counts, total = Counter(part), 0.0
        for token, times in question_counts.items():
            if n := counts[token]:
                rarity = log(1 + (len(chunks) - presence[token] + 0.5) / (presence[token] + 0.5))
                norm = _K1 * (1 - _B + _B * len(part) / mean_length)
                total += times * rarity * n * (_K1 + 1) / (n + norm)
        return total

    best = sorted(
        range(len(chunks)), key=lambda position: (-relevance(chunks[position]), position)
    )[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question


class ShiftedTarget(RejectionSampling):
    """The paper's rule: drafts are accepted with min(1, p' / q), where p' is the target's
    distribution p shifted towards the draft's q. After a rejection, the token is sampled from
    max(p - p', p - q, 0), normalised. At temperature 0 nothing is shifted.

    Args:
        eta: Strength of the shift (the paper: 5 to 50).
    """

    def __init__(self, eta: float) -> None:
        super().__init__()
        if not 0 < eta <= MAX_ETA:
            raise InvalidRequestError(
                f"eta is {eta}; allowed is a number above 0, at most {MAX_ETA} (the paper: 5 to 50)"
            )
        self.eta = eta
        self.exactness = "lossy"

    def shifted(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """p' = softmax(log p + eta (q - p)); p itself where p' is below a tenth of its maximum."""
        weights = p * np.exp(self.eta * (q - p))
        weights /= weights.sum()
        mixed = np.where(weights < 0.1 * weights.max(), p, weights)
        result: np.ndarray = mixed / mixed.sum()
        return result

    def steps(
        self, p: np.ndarray, q: np.ndarray | None, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        if q is None:
            yield from super().steps(p, q, kind, tokens)
            return
        (token,) = tokens  # drafts are chains
        shifted = self.shifted(p, q)
        rest = np.maximum(np.maximum(p - shifted, p - q), 0.0)
        total = rest.sum()
        yield min(1.0, float(shifted[token] / q[token])), rest / total if total > 0 else p


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

    def __init__(self, chunk: int, count: int, query: int, rule: Acceptance | None = None) -> None:
        if min(chunk, count, query) < 1:
            raise InvalidRequestError("rapid needs chunk, count and query >= 1")
        self.chunk = chunk
        self.count = count
        self.query = query
        self.rule = rule

    def open(self, sequence: Sequence) -> DraftSession:
        return _RetrievalSession(sequence, self)


class _RetrievalSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: RetrievalDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.prompt = retrieve_chunks(sequence.prompt, drafter.chunk, drafter.count, drafter.query)

    def propose(self, size: int) -> Proposal:
        text = self.prompt + self.sequence.tokens
        distributions = distribution_list(self.drafter.rule)
        drafts = yield from draft_after(self.sequence, text, size, distributions)
        return sampled_chain(drafts, distributions)


@register(
    Card(
        "rapid",
        "speculative",
        paper="RAPID (arXiv:2502.20330)",
        exactness="token-exact",
        summary="The draft model reads a short prompt of retrieved chunks instead of the long one.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with shared noise; acceptance='rejection' is the rule of"
            " speculative sampling",
            CHAIN_NOISE,
            "the paper's rule, which shifts the target towards the drafter and is lossy, is eta=10"
            " (the paper: 5 to 50)",
            "chunks are ranked by BM25 over tokens, not by an embedding model",
            "8 chunks of 64 tokens and the prompt's last 128; the paper takes chunks of 512 above"
            " a similarity of 0.3, between 4096 tokens and 1/24 of the prompt",
        ),
        remote={
            "size": Range(1, 64),
            "chunk": Range(1, 4096),
            "count": Range(1, 256),
            "query": Range(1, 4096),
            "eta": Range(0, MAX_ETA),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def rapid(
    size: int = 10,
    chunk: int = 64,
    count: int = 8,
    query: int = 128,
    eta: float | None = None,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """RAPID: drafting from retrieved chunks.

    Args:
        size: Number of drafts per round.
        chunk: Tokens per chunk.
        count: Number of retrieved chunks.
        query: Number of last prompt tokens that the chunks are ranked for.
        eta: Strength of the shift of the target towards the drafter; None: no shift. With it the
            rule is the paper's, and `acceptance` must not be given.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if eta is not None and acceptance != "token-exact":
        raise InvalidRequestError("rapid takes eta or acceptance, not both")
    rule = acceptance_rule(acceptance) if eta is None else ShiftedTarget(eta)
    drafter = RetrievalDrafter(chunk, count, query, rule)
    return Speculative(drafter, size, rule)
