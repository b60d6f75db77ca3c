"""Draft models with a shorter context than the target: LongSpec and RAPID.

LongSpec's draft model attends to a sliding window of constant size (Yang et al., arXiv:2502.17421).
RAPID's draft model reads chunks retrieved from a long prompt (Chen et al., arXiv:2502.20330).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from math import log, sqrt
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain, fit_vocab
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class WindowDrafter(Drafter):
    """Drafts with a draft model that keeps the first `sinks` and the last `window` positions."""

    runners = (DRAFT,)

    def __init__(self, window: int, sinks: int) -> None:
        if window < 1 or sinks < 0:
            raise InvalidRequestError("longspec needs window >= 1 and sinks >= 0")
        self.window = window
        self.sinks = sinks

    def open(self, sequence: Sequence) -> DraftSession:
        return _WindowSession(sequence, self)

    def evict(self, context: SequenceCache) -> None:
        """Evict the positions that have left the window."""
        slots = context.table[self.sinks : max(self.sinks, context.length - self.window)]
        evicted = [self.sinks + position for position, slot in enumerate(slots) if slot >= 0]
        if evicted:
            context.evict(evicted)


class _WindowSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: WindowDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence, drafter = self.sequence, self.drafter
        sequence.align(DRAFT)
        while len(unscored := sequence.unscored(DRAFT)) > drafter.window:
            yield sequence.score(unscored[: drafter.window], runner=DRAFT)
            drafter.evict(sequence.context(DRAFT))
        drafts = yield from draft_chain(sequence, [], size)
        drafter.evict(sequence.context(DRAFT))
        return TokenTree.chain(drafts)


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
    sequence: Sequence, text: list[int], size: int
) -> Generator[DecoderAction, Any, list[int]]:
    """Draft `size` tokens after `text`, which is the draft model's own, sampled with the noise of
    their positions in the target's text."""
    context = sequence.context(DRAFT)
    truncate_to_prefix(context, text)
    sampler = sequence.sampler.fork()
    drafts: list[int] = []
    for _ in range(size):
        scores = yield sequence.score((text + drafts)[context.length :], runner=DRAFT)
        row = fit_vocab(sequence, scores.row(-1))
        token = sequence.sample(sampler, row, sequence.length + len(drafts))
        sampler.advance(token)
        drafts.append(token)
    return drafts


def truncate_to_prefix(context: SequenceCache, text: list[int]) -> None:
    """Truncate the cache to its common prefix with `text`, at most all of `text` but the last
    token.
    """
    context.discard()
    cached = context.tokens
    num_common = min(len(cached), len(text) - 1)
    if cached[:num_common] != text[:num_common]:
        num_common = next(i for i in range(num_common) if cached[i] != text[i])
    if context.length > num_common:
        context.truncate(num_common)


class RetrievalDrafter(Drafter):
    """Drafts with a draft model that reads `count` retrieved chunks if the prompt is longer."""

    runners = (DRAFT,)

    def __init__(self, chunk: int, count: int, query: int) -> None:
        if min(chunk, count, query) < 1:
            raise InvalidRequestError("rapid needs chunk, count and query >= 1")
        self.chunk = chunk
        self.count = count
        self.query = query

    def open(self, sequence: Sequence) -> DraftSession:
        return _RetrievalSession(sequence, self)


class _RetrievalSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: RetrievalDrafter) -> None:
        self.sequence = sequence
        self.prompt = retrieve_chunks(sequence.prompt, drafter.chunk, drafter.count, drafter.query)

    def propose(self, size: int) -> Proposal:
        text = self.prompt + self.sequence.tokens
        drafts = yield from draft_after(self.sequence, text, size)
        return TokenTree.chain(drafts)


@register(
    Card(
        "longspec",
        "speculative",
        paper="LongSpec (arXiv:2502.17421), its constant-memory drafting",
        exactness="token-exact",
        summary="The draft model's cache is a sliding window after a few sink positions.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any draft model; the paper's trained layer, which also attends to the target's last"
            " layer, is not used",
            "positions are those of the text: evicted positions leave gaps",
            "drafts are chains; the paper verifies up to 16 beams together",
            "the first `sinks` positions stay in the cache besides the window",
        ),
    )
)
def longspec(size: int = 4, window: int = 512, sinks: int = 4) -> Speculative:
    """LongSpec: drafting with a sliding window.

    Args:
        size: Number of drafts per round.
        window: Number of last positions that the draft model keeps.
        sinks: Number of first positions that the draft model keeps.
    """
    return Speculative(WindowDrafter(window, sinks), size)


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
    )
)
def rapid(size: int = 10, chunk: int = 64, count: int = 8, query: int = 128) -> Speculative:
    """RAPID: drafting from retrieved chunks.

    Args:
        size: Number of drafts per round.
        chunk: Tokens per chunk.
        count: Number of retrieved chunks.
        query: Number of last prompt tokens that the chunks are compared with.
    """
    return Speculative(RetrievalDrafter(chunk, count, query), size)
