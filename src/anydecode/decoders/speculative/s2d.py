"""S2D: drafts from the early exits of one draft model (Kavehzadeh et al., "S2D: Sorted Speculative
Decoding For More Efficient Deployment of Nested Large Language Models", arXiv:2407.01955).

Each draft comes from the first exit of the draft model whose largest probability reaches a
threshold.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_distribution, fit_vocab
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.framework.variants import check_late_start
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence


class NestedDrafter(Drafter):
    """Drafts each token at the first exit whose largest probability reaches `confidence`; the last
    exit is the whole draft model. `exits` are fractions of its depth."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self, exits: tuple[float, ...], confidence: float, rule: Acceptance | None = None
    ) -> None:
        if not exits or any(not 0 < share < 1 for share in exits) or list(exits) != sorted(exits):
            raise InvalidRequestError("s2d needs rising exits between 0 and 1, such as 0.5-0.75")
        if not 0 <= confidence <= 1:
            raise InvalidRequestError("s2d needs a confidence from 0 to 1")
        self.exits = exits
        self.confidence = confidence
        self.rule = rule

    def prepare(self, sequence: Sequence) -> None:
        model = sequence.model(DRAFT)
        if self.layers(model.spec.num_layers):
            check_late_start(model)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def layers(self, depth: int) -> list[int]:
        """The exit layers of a model with `depth` layers, without the last."""
        layers = {min(depth - 1, max(1, round(share * depth))) for share in self.exits}
        return sorted(layers - {0}) if depth > 1 else []


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
        distributions = distribution_list(self.drafter.rule)
        for _ in range(size):
            row = yield from self._row(last, sampler)
            last = sequence.sample(sampler, row, sequence.length + len(drafts))
            if distributions is not None:
                distributions.append(sampler.distribution(row).dense(len(row)))
            sampler.advance(last)
            drafts.append(last)
        return sampled_chain(drafts, distributions)

    def _row(self, token: int, sampler: Sampler) -> Generator[DecoderAction, Any, np.ndarray]:
        """The row of the first exit whose confidence is high enough. The choice depends on the
        distribution alone, not on the token sampled from it."""
        sequence = self.sequence
        depth = sequence.model(DRAFT).spec.num_layers
        exits = self.drafter.layers(depth)
        if not exits:
            scores = yield sequence.score([token], runner=DRAFT)
            return fit_vocab(sequence, scores.row(-1))
        scores = yield sequence.score([token], runner=DRAFT, layers=(0, exits[0]))
        for stop in [*exits[1:], depth]:
            row = fit_vocab(sequence, scores.row(-1))
            distribution = draft_distribution(sampler, row)
            if float(distribution.probabilities().max()) >= self.drafter.confidence:
                return row
            scores = yield sequence.complete(runner=DRAFT, stop=stop)
        return fit_vocab(sequence, scores.row(-1))


def exit_fractions(exits: str) -> tuple[float, ...]:
    """The exits in a text such as "0.5-0.75", as fractions of a model's depth. Raises
    InvalidRequestError for another text."""
    try:
        return tuple(float(part) for part in str(exits).split("-"))
    except ValueError:
        raise InvalidRequestError(
            f"exits={exits!r} is not a list of numbers such as 0.5-0.75"
        ) from None


@register(
    Card(
        "s2d",
        "speculative",
        paper="Sorted Speculative Decoding (arXiv:2407.01955)",
        exactness="token-exact",
        summary="Each draft comes from the first exit of the draft model with enough confidence.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any draft model; sorted fine-tuning, which trains the first layers of a model for all"
            " exits, is `anydecode train nested`, on the model's own answers with a frozen head",
            "the layers after an early exit are computed when a later exit is first needed",
            "one confidence for all exits and targets; the paper tunes it by the target's size",
            "verified token-exactly with shared noise; the paper's rule is acceptance='rejection'",
            CHAIN_NOISE,
        ),
        remote={
            "size": Range(1, 64),
            "exits": Text(32),
            "confidence": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def s2d(
    size: int = 4,
    exits: str = "0.5-0.75",
    confidence: float = 0.7,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """S2D: nested drafting with early exits.

    Args:
        size: Number of drafts per round.
        exits: Exits as fractions of the draft model's depth, rising, such as "0.5-0.75".
        confidence: Largest probability from which an exit is taken, from 0 to 1.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    drafter = NestedDrafter(exit_fractions(exits), confidence, rule)
    return Speculative(drafter, size, rule)
