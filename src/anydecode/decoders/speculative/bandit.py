"""Draft lengths by Thompson sampling, EESD (Liu et al., "Speculative Decoding via Early-exiting for
Faster LLM Inference with Thompson Sampling Control Mechanism", arXiv:2406.03853).

The drafter is the paper's early exit (`models/early_exit.py`, which `anydecode train drafter
--recipe early-exit` trains), another draft model, or any method that drafts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anydecode.catalogue import Card, Nested, Range, Words, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.framework.thompson import CONTROLS, Posterior
from anydecode.decoders.speculative.draft_model import ModelDrafter, draft_chain
from anydecode.decoders.speculative.goodput import chain_drafter
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import DRAFT, Sequence


class BanditBudget(DraftBudget):
    """Thompson sampling of every step (Beta-TS): after each draft, another one follows as
    `Posterior` says."""

    def __init__(self, sequence: Sequence, max_size: int, memory: float) -> None:
        self.max_size = max_size
        self.posterior = Posterior(sequence, memory)

    def size(self, sequence: Sequence) -> int:
        self.posterior.begin(sequence.length)
        size = 1
        while size < self.max_size and self.posterior.continues():
            size += 1
        return size

    def observe(self, round: SpeculationRound) -> None:
        self.posterior.observe(round.num_accepted, len(round.tree))


class CalibratedDrafter(Drafter):
    """Drafts chains with the draft model as long as `Posterior` says of its confidence in each
    draft (Calibration-TS)."""

    requirements = ModelDrafter.requirements

    def __init__(self, memory: float, rule: Acceptance | None = None) -> None:
        self.memory = memory
        self.rule = rule

    def open(self, sequence: Sequence) -> DraftSession:
        return _CalibratedSession(sequence, self)


class _CalibratedSession(DraftSession):
    def __init__(self, sequence: Sequence, drafter: CalibratedDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.posterior = Posterior(sequence, drafter.memory)
        self._num_drafts = self._size = 0

    def propose(self, size: int) -> Proposal:
        self.sequence.align(DRAFT)
        distributions = distribution_list(self.drafter.rule)
        self._num_drafts, self._size = 0, size
        self.posterior.begin(self.sequence.length)
        drafts = yield from draft_chain(
            self.sequence, [], size, distributions=distributions, should_stop=self._should_stop
        )
        return sampled_chain(drafts, distributions)

    def _should_stop(self, sampler: Sampler, row: np.ndarray, token: int) -> bool:
        self._num_drafts += 1
        if self._num_drafts >= self._size:
            return True
        weights = np.exp(row - row.max())
        return not self.posterior.continues(float(weights[token] / weights.sum()))

    def observe(self, round: SpeculationRound) -> None:
        self.posterior.observe(round.num_accepted, len(round.tree))


class ModelOrCopies(Drafter):
    """Drafts with the draft model if there is one, or else copies from the text."""

    def __init__(self, rule: Acceptance | None = None) -> None:
        self.model = ModelDrafter(rule)
        self.copies = chain_drafter("prompt-lookup", rule)
        self.requirements: Requirements = replace(
            self.copies.requirements, optional_runners=(DRAFT,), reads_states=True
        )

    def open(self, sequence: Sequence) -> DraftSession:
        has_model = DRAFT in sequence.optional_runners
        return (self.model if has_model else self.copies).open(sequence)


@register(
    Card(
        "bandit",
        "speculative",
        paper="EESD (arXiv:2406.03853)",
        exactness="token-exact",
        summary="A bandit decides after every draft, by Thompson sampling, whether to draft on.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "any drafter; with Beta-TS the length is drawn before it drafts, which is the same,"
            " since the draws do not depend on the drafts",
            "a round has one failure if a draft was rejected, and the counts decay; the paper's"
            " constants are not known, nor the weight of the confidence in Calibration-TS, here 5"
            " drafts",
            "the early exit has a cache of its own, so that verification runs the first layers"
            " again; its loss is that of the other recipes of drafters",
        ),
        remote={
            "drafter": Nested(),
            "max_drafts": Range(1, 64),
            "memory": Range(0, 1),
            "control": Words(CONTROLS),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def bandit(
    drafter: str | None = None,
    max_drafts: int = 8,
    memory: float = 0.95,
    acceptance: str | Acceptance = "token-exact",
    control: str = "beta",
) -> Speculative:
    """Draft lengths by Thompson sampling.

    Args:
        drafter: Key of the speculative method that drafts. None: "speculative-sampling" if there
            is a draft model, such as an early exit, or else "prompt-lookup".
        max_drafts: Maximum draft length.
        memory: Decay of the counts per round, above 0 and at most 1.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
        control: "beta" (Beta-TS), or "calibration" (Calibration-TS), which needs a draft model.
    """
    if not 0 < memory <= 1:
        raise InvalidRequestError("bandit needs 0 < memory <= 1")
    if control not in CONTROLS:
        raise InvalidRequestError(f"control is {control!r}; choose from {', '.join(CONTROLS)}")
    rule = acceptance_rule(acceptance)
    if control == "calibration":
        if drafter not in (None, "speculative-sampling"):
            raise InvalidRequestError(
                f"control=calibration reads the confidence of a draft model, which {drafter!r} does"
                " not tell: leave drafter out"
            )
        return Speculative(CalibratedDrafter(memory, rule), max_drafts, rule)
    return Speculative(
        ModelOrCopies(rule) if drafter is None else chain_drafter(drafter, rule),
        max_drafts,
        rule,
        budget=lambda sequence: BanditBudget(sequence, max_drafts, memory),
    )
