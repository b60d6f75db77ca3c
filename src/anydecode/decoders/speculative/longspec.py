"""LongSpec: the draft model attends to a sliding window of constant size (Yang et al., "LongSpec:
Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification",
arXiv:2502.17421)."""

from __future__ import annotations

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
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain, sampled_chain
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.sequence import Sequence


class WindowDrafter(Drafter):
    """Drafts with a draft model that keeps the first `sinks` and the last `window` positions."""

    requirements = Requirements(runners=(DRAFT,), attention_only=(DRAFT,))

    def __init__(self, window: int, sinks: int, with_probabilities: bool = False) -> None:
        if window < 1 or sinks < 0:
            raise InvalidRequestError("longspec needs window >= 1 and sinks >= 0")
        self.window = window
        self.sinks = sinks
        self.with_probabilities = with_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _WindowSession(sequence, self)

    def evict(self, kv_cache: SequenceCache) -> None:
        """Evict the positions that have left the window."""
        slots = kv_cache.table[self.sinks : max(self.sinks, kv_cache.length - self.window)]
        evicted = [self.sinks + position for position, slot in enumerate(slots) if slot >= 0]
        if evicted:
            kv_cache.evict(evicted)


class _WindowSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: WindowDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence, drafter = self.sequence, self.drafter
        sequence.align(DRAFT)
        while len(unscored := sequence.unscored(DRAFT)) > drafter.window:
            yield sequence.score(unscored[: drafter.window], runner=DRAFT)
            drafter.evict(sequence.kv_cache(DRAFT))
        distributions: list[np.ndarray] | None = [] if drafter.with_probabilities else None
        drafts = yield from draft_chain(sequence, [], size, distributions=distributions)
        drafter.evict(sequence.kv_cache(DRAFT))
        return sampled_chain(drafts, distributions)


@register(
    Card(
        "longspec",
        "speculative",
        paper="LongSpec (arXiv:2502.17421), its constant-memory drafting",
        exactness="token-exact",
        summary="The draft model's cache is a sliding window after a few sink positions.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        missing=(
            "the paper's draft layer, which attends to the keys and values of the target's last"
            " layer, and its training: anchor-offset positions and flash noisy training",
            "drafts of several beams, verified by hybrid tree attention",
        ),
        deviations=(
            "positions are those of the text: evicted positions leave gaps",
            "the first `sinks` positions stay in the cache besides the window",
        ),
        remote={
            "size": Range(0, 64),
            "window": Range(1, 65536),
            "sinks": Range(0, 4096),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def longspec(
    size: int = 4,
    window: int = 512,
    sinks: int = 4,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """LongSpec: drafting with a sliding window.

    Args:
        size: Number of drafts per round.
        window: Number of last positions that the draft model keeps.
        sinks: Number of first positions that the draft model keeps.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    rule = acceptance_rule(acceptance)
    drafter = WindowDrafter(window, sinks, isinstance(rule, RejectionSampling))
    return Speculative(drafter, size, rule)
