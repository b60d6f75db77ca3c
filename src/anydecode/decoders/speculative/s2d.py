"""Nested drafts from the exits of one draft model (Kavehzadeh et al., "S2D: Sorted Speculative
Decoding For More Efficient Deployment of Nested Large Language Models", arXiv:2407.01955)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.decoders.speculative.draft_trees import draft_distribution
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class NestedDrafter(Drafter):
    """A token comes from the first exit whose largest probability reaches `confidence`; the last
    exit is the whole draft model. `exits` are shares of its depth."""

    runners = (DRAFT,)

    def __init__(self, exits: tuple[float, ...], confidence: float) -> None:
        if not exits or any(not 0 < share < 1 for share in exits) or list(exits) != sorted(exits):
            raise InvalidRequestError("s2d needs exits between 0 and 1 that rise, such as 0.5-0.75")
        if not 0 <= confidence <= 1:
            raise InvalidRequestError("s2d needs a confidence from 0 to 1")
        self.exits = exits
        self.confidence = confidence

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def layers(self, depth: int) -> list[int]:
        """The exit layers of a model with `depth` layers, the last not among them."""
        found = {min(depth - 1, max(1, round(share * depth))) for share in self.exits}
        return sorted(found - {0}) if depth > 1 else []


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: NestedDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        sequence.align(DRAFT)
        sampler = sequence.sampler.fork()
        unscored = sequence.unscored(DRAFT)
        if len(unscored) > 1:
            yield sequence.score(unscored[:-1], runner=DRAFT)
        last = unscored[-1]
        drafts: list[int] = []
        for _ in range(size):
            row = yield from self._row(last, sampler)
            last = sequence.sample(sampler, row, sequence.length + len(drafts))
            sampler.advance(last)
            drafts.append(last)
        return TokenTree.chain(drafts)

    def _row(self, token: int, sampler: Sampler) -> Generator[DecoderAction, Any, np.ndarray]:
        """The row of the first exit that is sure enough. Whether it is depends on its distribution
        alone, never on the token that will be drawn."""
        sequence = self.sequence
        depth = sequence.context(DRAFT).pool.model.spec.num_layers
        exits = self.drafter.layers(depth)
        if not exits:
            scores = yield sequence.score([token], runner=DRAFT)
            return fitted(sequence, scores.row(-1))
        scores = yield sequence.score([token], runner=DRAFT, layers=(0, exits[0]))
        for following in [*exits[1:], depth]:
            row = fitted(sequence, scores.row(-1))
            found = draft_distribution(sampler, row)
            if float(found.probabilities().max()) >= self.drafter.confidence:
                return row
            scores = yield sequence.complete(runner=DRAFT, stop=following)
        return fitted(sequence, scores.row(-1))


@register(
    Card(
        "s2d",
        "speculative",
        paper="Sorted Speculative Decoding (arXiv:2407.01955)",
        exactness="token-exact",
        summary="Each draft comes from the first exit of the draft model that is sure enough.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any draft model, not one trained with losses at its exits",
            "what an early exit left out is computed when a later exit is first needed",
            "one confidence for every exit and target; the paper tunes it by the target's size",
            "verified token-exactly with shared noise",
        ),
    )
)
def s2d(size: int = 4, exits: str = "0.5-0.75", confidence: float = 0.7) -> Speculative:
    """Nested drafting; `exits` are shares of the draft model's depth."""
    try:
        shares = tuple(float(part) for part in str(exits).split("-"))
    except ValueError:
        raise InvalidRequestError(f"exits={exits!r} is no list such as 0.5-0.75") from None
    return Speculative(NestedDrafter(shares, confidence), size)
