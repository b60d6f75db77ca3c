"""Draft models that see less than the target does: a window of constant size (Yang et al.,
"LongSpec", arXiv:2502.17421), or what was retrieved from a long prompt (Chen et al., "RAPID",
arXiv:2502.20330)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from math import log, sqrt
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain, fitted
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class WindowDrafter(Drafter):
    """The draft model keeps the first `sinks` positions and the last `window` ones."""

    runners = (DRAFT,)

    def __init__(self, window: int, sinks: int) -> None:
        if window < 1 or sinks < 0:
            raise InvalidRequestError("longspec needs window of at least 1 and sinks of at least 0")
        self.window = window
        self.sinks = sinks

    def open(self, sequence: Sequence) -> DraftSession:
        return _WindowSession(sequence, self)

    def shrink(self, context: SequenceCache) -> None:
        """Evict what has left the window."""
        held = context.table[self.sinks : max(self.sinks, context.length - self.window)]
        gone = [self.sinks + position for position, slot in enumerate(held) if slot >= 0]
        if gone:
            context.evict(gone)


class _WindowSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: WindowDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence, drafter = self.sequence, self.drafter
        sequence.align(DRAFT)
        while len(unscored := sequence.unscored(DRAFT)) > drafter.window:
            yield sequence.score(unscored[: drafter.window], runner=DRAFT)
            drafter.shrink(sequence.context(DRAFT))
        drafts = yield from draft_chain(sequence, [], size)
        drafter.shrink(sequence.context(DRAFT))
        return TokenTree.chain(drafts)


def retrieved(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The prompt's last `query` tokens behind the `count` chunks of `chunk` tokens before them that
    are most like them: cosine of token counts weighted by rarity, kept in the prompt's order."""
    body, question = prompt[: max(0, len(prompt) - query)], prompt[-query:]
    chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)]
    presence = Counter(token for part in chunks for token in set(part))
    rarity = {token: log((1 + len(chunks)) / (0.5 + n)) for token, n in presence.items()}
    asked = Counter(question)

    def likeness(part: list[int]) -> float:
        weights = {token: n * rarity[token] for token, n in Counter(part).items()}
        norm = sqrt(sum(weight * weight for weight in weights.values()))
        shared = sum(w * n * rarity[t] for t, w in weights.items() if (n := asked.get(t, 0)))
        return shared / norm if norm else 0.0

    best = sorted(range(len(chunks)), key=lambda position: (-likeness(chunks[position]), position))[
        :count
    ]
    return [token for position in sorted(best) for token in chunks[position]] + question


def draft_behind(
    sequence: Sequence, text: list[int], size: int
) -> Generator[DecoderAction, Any, list[int]]:
    """`size` tokens that the draft model says behind `text`, a text of its own, picked with the
    noise of the places they will have in the target's."""
    context = sequence.context(DRAFT)
    follow(context, text)
    sampler = sequence.sampler.fork()
    drafts: list[int] = []
    for _ in range(size):
        scores = yield sequence.score((text + drafts)[context.length :], runner=DRAFT)
        row = fitted(sequence, scores.row(-1))
        token = sequence.sample(sampler, row, sequence.length + len(drafts))
        sampler.advance(token)
        drafts.append(token)
    return drafts


def follow(context: SequenceCache, text: list[int]) -> None:
    """Forget what is not a prefix of `text`, and its last token."""
    context.discard()
    held = context.tokens
    same = min(len(held), len(text) - 1)
    if held[:same] != text[:same]:
        same = next(i for i in range(same) if held[i] != text[i])
    if context.length > same:
        context.truncate(same)


class RetrievalDrafter(Drafter):
    """The draft model reads a prompt of `count` retrieved chunks where the whole is longer."""

    runners = (DRAFT,)

    def __init__(self, chunk: int, count: int, query: int) -> None:
        if min(chunk, count, query) < 1:
            raise InvalidRequestError("rapid needs chunk, count and query of at least 1")
        self.chunk = chunk
        self.count = count
        self.query = query

    def open(self, sequence: Sequence) -> DraftSession:
        return _RetrievalSession(sequence, self)


class _RetrievalSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: RetrievalDrafter) -> None:
        self.sequence = sequence
        self.prompt = retrieved(sequence.prompt, drafter.chunk, drafter.count, drafter.query)

    def propose(self, size: int) -> Proposal:
        text = self.prompt + self.sequence.tokens
        drafts = yield from draft_behind(self.sequence, text, size)
        return TokenTree.chain(drafts)


@register(
    Card(
        "longspec",
        "speculative",
        paper="LongSpec (arXiv:2502.17421), its constant-memory drafting",
        exactness="token-exact",
        summary="The draft model's memory is a sliding window behind a few sinks.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any draft model; the paper's trained layer, which also attends to the target's last"
            " layer, is not used",
            "positions are the text's own: evicted positions leave holes",
            "drafts are chains; the paper verifies beams of up to 16 side by side",
            "the first `sinks` positions stay in memory beside the window",
        ),
    )
)
def longspec(size: int = 4, window: int = 512, sinks: int = 4) -> Speculative:
    """Chains of `size` drafts from a draft model with a window."""
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
            "8 chunks of 64 tokens and the prompt's last 128; the paper takes chunks of 512 above a"
            " similarity of 0.3, between 4096 tokens and a 24th of the prompt",
            "verified token-exactly with shared noise",
        ),
    )
)
def rapid(size: int = 10, chunk: int = 64, count: int = 8, query: int = 128) -> Speculative:
    """Chains of `size` drafts behind `count` retrieved chunks and the prompt's last tokens."""
    return Speculative(RetrievalDrafter(chunk, count, query), size)
