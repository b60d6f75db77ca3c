"""SpecDec++: chains that end when a rejection becomes probable (Huang et al., "SpecDec++: Boosting
Speculative Decoding via Adaptive Candidate Lengths", arXiv:2405.19715).

The product of the drafts' probabilities estimates the probability that all are accepted. Drafting
stops when one minus this product passes a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import (
    DRAFT,
    distribution_list,
    draft_chain,
    sampled_chain,
)
from anydecode.decoders.speculative.draft_trees import draft_distribution
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence


class StopThreshold:
    """Ends a chain after the first token with which the probability of a rejection, 1 minus the
    product of the drafts' probabilities, exceeds `bound`. That token is kept."""

    def __init__(self, bound: float, min_drafts: int) -> None:
        self.bound = bound
        self.min_drafts = min_drafts
        self.num_drafts = 0
        self.all_accepted_probability = 1.0

    def __call__(self, sampler: Sampler, row: np.ndarray, token: int) -> bool:
        self.num_drafts += 1
        self.all_accepted_probability *= exp(
            draft_distribution(sampler, row).log_probability(token)
        )
        return self.num_drafts >= self.min_drafts and 1 - self.all_accepted_probability > self.bound


class ThresholdDrafter(Drafter):
    """Drafts chains with the runner "draft" that `StopThreshold` ends."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True)

    def __init__(self, bound: float, min_drafts: int, rule: Acceptance | None = None) -> None:
        self.stop: Callable[[], StopThreshold] = lambda: StopThreshold(bound, min_drafts)
        self.rule = rule

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: ThresholdDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        self.sequence.align(DRAFT)
        distributions = distribution_list(self.drafter.rule)
        stop = self.drafter.stop()
        drafts = yield from draft_chain(
            self.sequence, [], size, distributions=distributions, should_stop=stop
        )
        return sampled_chain(drafts, distributions)


@register(
    Card(
        "specdec++",
        "speculative",
        paper="SpecDec++ (arXiv:2405.19715)",
        exactness="token-exact",
        summary="The draft model stops when the probability of a rejection passes a threshold.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        missing=("the trained head that predicts the acceptance of a draft",),
        deviations=(
            "a draft's acceptance probability is its draft probability (at temperature 0 that of"
            " temperature 1)",
            "verified token-exactly with shared noise; acceptance='rejection' is the paper's rule",
        ),
        remote={
            "bound": Range(0, 1),
            "min_drafts": Range(1, 64),
            "size": Range(0, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def specdecpp(
    bound: float = 0.7,
    min_drafts: int = 2,
    size: int = 20,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """SpecDec++: adaptive draft lengths.

    Args:
        bound: Probability of a rejection at which drafting stops, between 0 and 1.
        min_drafts: Minimum number of drafts per round.
        size: Maximum number of drafts per round.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    if not 0 < bound < 1 or not 1 <= min_drafts <= size:
        raise InvalidRequestError("specdec++ needs 0 < bound < 1 and 1 <= min_drafts <= size")
    rule = acceptance_rule(acceptance)
    drafter = ThresholdDrafter(bound, min_drafts, rule)
    return Speculative(drafter, size, rule)
