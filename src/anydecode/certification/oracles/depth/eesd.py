"""Oracle test of EESD: draft lengths replayed from the counts of accepted and rejected drafts, with
both controls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.exit_drafts import (
    exit_checks,
    exit_penalty_checks,
    exit_rejection_checks,
)

MEMORY, WEIGHT = 0.95, 5.0


class _Posterior:
    """A rate per draft from a beta distribution: its counts are one each at first, and those of all
    rounds, each weighted by its age; with Calibration-TS five more drafts that were accepted as
    often as the drafter expects."""

    def __init__(self, is_calibrated: bool) -> None:
        self.is_calibrated = is_calibrated
        self.random = Random("5/0")
        self.outcomes: list[tuple[int, bool]] = []

    def continues(self, token_share: float, top_share: float) -> bool:
        ages = range(len(self.outcomes) - 1, -1, -1)
        weights = [MEMORY**age for age in ages]
        hits = sum(w * n for w, (n, _) in zip(weights, self.outcomes, strict=True))
        misses = sum(w for w, (_, is_cut) in zip(weights, self.outcomes, strict=True) if is_cut)
        if self.is_calibrated:
            hits, misses = hits + WEIGHT * token_share, misses + WEIGHT * (1 - token_share)
        rate = self.random.betavariate(1 + hits, 1 + misses)
        return self.random.random() < rate

    def observe(self, num_accepted: int, num_drafts: int) -> None:
        if num_drafts:
            self.outcomes.append((num_accepted, num_accepted < num_drafts))


@oracle_test("eesd")
def eesd() -> Iterator[Check]:
    """Up to eight drafts of the first layers and the trained one, by Thompson sampling. Samples
    under the rejection rule follow the target."""
    yield from exit_penalty_checks("eesd", has_mlp=True)
    for decoder, is_calibrated in (("eesd", False), ("eesd:control=calibration", True)):
        yield from exit_checks(decoder, 8, partial(_Posterior, is_calibrated), sharpness=2.0)
    yield from exit_rejection_checks("eesd", has_mlp=True)
