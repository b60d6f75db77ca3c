"""Draft lengths by Thompson sampling, EESD (Liu et al., "Speculative Decoding via Early-exiting for
Faster LLM Inference with Thompson Sampling Control Mechanism", arXiv:2406.03853)."""

from __future__ import annotations

from random import Random

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.goodput import chain_drafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class BanditBudget(DraftBudget):
    """Thompson sampling of every step (Beta-TS): after each draft an acceptance rate is drawn from
    its posterior, Beta(accepted + 1, rejected + 1), and another draft follows with that
    probability. Counts decay by `memory` per round.
    """

    def __init__(self, sequence: Sequence, max_size: int, memory: float) -> None:
        self.max_size = max_size
        self.memory = memory
        self.accepted = 0.0
        self.rejected = 0.0
        self._random = Random(f"{sequence.noise.seed}/{sequence.noise.stream}")

    def size(self, sequence: Sequence) -> int:
        size = 1
        while size < self.max_size and self._continues():
            size += 1
        return size

    def _continues(self) -> bool:
        rate = self._random.betavariate(self.accepted + 1, self.rejected + 1)
        return self._random.random() < rate

    def observe(self, round: SpeculationRound) -> None:
        num_drafts = len(round.tree)
        if num_drafts:
            has_rejection = round.num_accepted < num_drafts
            self.accepted = self.memory * self.accepted + round.num_accepted
            self.rejected = self.memory * self.rejected + has_rejection


@register(
    Card(
        "bandit",
        "speculative",
        paper="EESD (arXiv:2406.03853), its Thompson sampling of the draft length",
        exactness="token-exact",
        summary="A bandit decides after every draft, by Thompson sampling, whether to draft on.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        missing=(
            "the drafter of the paper, an early exit with a trained layer",
            "Calibration-TS, whose rate starts from the drafter's confidence",
        ),
        deviations=(
            "any drafter; the length is drawn before it drafts, which is the same, since the draws"
            " do not depend on the drafts",
            "a round has one failure if a draft was rejected, and the counts decay; the paper's"
            " constants are not known",
        ),
        remote={
            "drafter": Nested(),
            "max_drafts": Range(0, 64),
            "memory": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def bandit(
    drafter: str = "prompt-lookup",
    max_drafts: int = 8,
    memory: float = 0.95,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Draft lengths by Thompson sampling.

    Args:
        drafter: Key of the speculative method that drafts.
        max_drafts: Maximum draft length.
        memory: Decay of the counts per round, above 0 and at most 1.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    if not 0 < memory <= 1:
        raise InvalidRequestError("bandit needs 0 < memory <= 1")
    rule = acceptance_rule(acceptance)
    return Speculative(
        chain_drafter(drafter, rule),
        max_drafts,
        rule,
        budget=lambda sequence: BanditBudget(sequence, max_drafts, memory),
    )
