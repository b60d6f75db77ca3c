"""A chain that ends where a reject has become likely (Huang et al., "SpecDec++: Boosting
Speculative Decoding via Adaptive Candidate Lengths", arXiv:2405.19715)."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.acceptance import Acceptance
from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain
from anydecode.decoders.speculative.draft_trees import draft_distribution
from anydecode.decoders.speculative.rejection import RejectionSampling, rule
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class StopThreshold:
    """Ends a chain with the first token that makes the chance of some reject, 1 minus the product
    of the drafts' probabilities, larger than `bound`. That token stays."""

    def __init__(self, bound: float, fewest: int) -> None:
        self.bound = bound
        self.fewest = fewest
        self.count = 0
        self.all_right = 1.0

    def __call__(self, sampler: Sampler, row: np.ndarray, token: int) -> bool:
        self.count += 1
        self.all_right *= exp(draft_distribution(sampler, row).log_probability(token))
        return self.count >= self.fewest and 1 - self.all_right > self.bound


class ThresholdDrafter(Drafter):
    """Chains from the lane "draft" that `Threshold` ends."""

    runners = (DRAFT,)

    def __init__(self, bound: float, fewest: int, with_probabilities: bool = False) -> None:
        self.stop: Callable[[], StopThreshold] = lambda: StopThreshold(bound, fewest)
        self.with_probabilities = with_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: ThresholdDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        self.sequence.align(DRAFT)
        drawn: list[np.ndarray] | None = [] if self.drafter.with_probabilities else None
        stop = self.drafter.stop()
        drafts = yield from draft_chain(self.sequence, [], size, drawn=drawn, ends=stop)
        rows = {node - 1: row for node, row in enumerate(drawn or ())}
        return TokenTree.chain(drafts, probabilities=rows, kind="wor" if rows else "point")


@register(
    Card(
        "specdec++",
        "speculative",
        paper="SpecDec++ (arXiv:2405.19715)",
        exactness="token-exact",
        summary="The draft model stops where the chance of a reject passes a threshold.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "a draft's acceptance is predicted by its draft probability (at temperature 0 that of"
            " temperature 1), not by a trained head",
            "verified token-exactly with shared noise; acceptance='rejection' is the paper's rule",
        ),
    )
)
def specdec(
    bound: float = 0.7,
    fewest: int = 2,
    size: int = 20,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """SpecDec++ with `fewest` to `size` drafts a round."""
    if not 0 < bound < 1 or not 1 <= fewest <= size:
        raise InvalidRequestError("specdec++ needs 0 < bound < 1 and 1 <= fewest <= size")
    chosen = rule(acceptance)
    drafter = ThresholdDrafter(bound, fewest, isinstance(chosen, RejectionSampling))
    return Speculative(drafter, size, chosen)
