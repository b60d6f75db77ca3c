"""SpecDec++: chains that end when a rejection becomes probable (Huang et al., "SpecDec++: Boosting
Speculative Decoding via Adaptive Candidate Lengths", arXiv:2405.19715).

A head on the draft model's last hidden state predicts whether the draft that was fed is accepted.
Drafting stops when the probability of a rejection, one minus the product of the predictions, passes
a threshold. The head is stored beside the draft model (`anydecode train acceptance-head`), and
learns from the verified drafts of earlier requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import exp
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.draft_candidates import draft_distribution
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.acceptance_head import AcceptanceHead, OnlineHead
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.errors import InvalidRequestError
from anydecode.models.acceptance_head import AcceptanceWeights
from anydecode.models.exit_files import network_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.tree import TokenTree


class StopThreshold:
    """Ends a chain after the first token with which the probability of a rejection exceeds `bound`.
    That token is kept.

    The probability is 1 minus the product of the head's predictions for the drafts before it, which
    have been fed; without a head, 1 minus that of the probabilities of the drafts and it.

    Args:
        bound: See above.
        min_drafts: Minimum number of drafts.
        head: The trained head.
        states: The draft model's hidden states before each draft, for the head.
    """

    def __init__(
        self,
        bound: float,
        min_drafts: int,
        head: AcceptanceHead | None = None,
        states: Seq[np.ndarray] = (),
    ) -> None:
        self.bound = bound
        self.min_drafts = min_drafts
        self.head, self.states = head, states
        self.draft_probabilities: list[float] = []
        self.samplers: list[Sampler] = []  # as they were before each draft
        self.all_accepted_probability = 1.0

    @property
    def num_drafts(self) -> int:
        """The number of drafts."""
        return len(self.draft_probabilities)

    def __call__(self, sampler: Sampler, row: np.ndarray, token: int) -> bool:
        probability = exp(draft_distribution(sampler, row).log_probability(token))
        self.draft_probabilities.append(probability)
        self.samplers.append(sampler.fork() if sampler.is_stateful else sampler)
        if self.head is None:
            self.all_accepted_probability *= probability
        elif self.num_drafts > 1:
            self.all_accepted_probability *= float(self.head(self.states[-1]))
        return self.num_drafts >= self.min_drafts and 1 - self.all_accepted_probability > self.bound


class ThresholdDrafter(Drafter):
    """Drafts chains with the runner "draft" that `StopThreshold` ends. The head is trained at the
    end of a request, if there are enough new examples and no text depends on what is drafted."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True)

    def __init__(
        self, bound: float, min_drafts: int, rate: float, rule: Acceptance | None = None
    ) -> None:
        self.bound, self.min_drafts = bound, min_drafts
        self.online = OnlineHead(rate if is_token_exact(rule) else 0.0)
        self.rule = rule

    def prepare(self, sequence: Sequence) -> None:
        model, target = (sequence.model(name) for name in (DRAFT, TARGET))
        stored: AcceptanceWeights | None = getattr(model, "acceptance_head", None)
        if stored is not None:
            lacks = "states for an acceptance head, which needs a transformer"
            stored.check(network_of(model, lacks), network_of(target, lacks))
            self.online.begin(stored)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.online.clear()

    @property
    def num_bytes(self) -> int:
        return self.online.num_bytes


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: ThresholdDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self._states: list[np.ndarray] = []
        self._probabilities: list[float] = []
        self._samplers: list[Sampler] = []
        self._drafted: TokenTree | None = None

    def propose(self, size: int) -> Proposal:
        drafter = self.drafter
        self.sequence.align(DRAFT)
        distributions = distribution_list(drafter.rule)
        model: Any = self.sequence.model(DRAFT)
        online, self._states = drafter.online, []
        reads = getattr(model, "has_hidden", True) and (online.rate > 0 or online.head is not None)
        stop = StopThreshold(
            drafter.bound, drafter.min_drafts, online.head if reads else None, self._states
        )
        drafts = yield from draft_chain(
            self.sequence,
            [],
            size,
            distributions=distributions,
            should_stop=stop,
            states=self._states if reads else None,
        )
        self._probabilities, self._samplers = stop.draft_probabilities, stop.samplers
        self._drafted = sampled_chain(drafts, distributions)
        return self._drafted

    def observe(self, round: SpeculationRound) -> None:
        """Store the state of each draft that was fed and the probability min(1, p / q) that the
        rejection rule accepts it; train at the end of the request. The target's rows tell p of all
        drafts in the pass and of the one after them. Which ones a pass leaves out depends on the
        load and on their depth, not on p / q, so what is learned of a state stays the same."""
        online, scores, drafted = self.drafter.online, round.scores, self._drafted
        self._drafted = None
        if online.rate and drafted is not None:
            drafts = zip(drafted.tokens, self._probabilities, self._samplers, strict=True)
            for row, ((token, q, sampler), state) in enumerate(
                zip(drafts, self._states[1 : 1 + len(scores)], strict=False)
            ):
                target = sampler.distribution(scores.row(row))
                online.add(state, min(1.0, exp(target.log_probability(token)) / max(q, 1e-30)))
        if round.sequence.finished:
            online.train()


@register(
    Card(
        "specdec++",
        "speculative",
        paper="SpecDec++ (arXiv:2405.19715)",
        exactness="token-exact",
        summary="A head on the draft model predicts rejections, and stops drafting before them.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the head that `anydecode train acceptance-head` stores beside the draft model learns"
            " from drafts of real rounds (the paper: from texts that mix drafts with the target's"
            " tokens), and goes on learning between requests from those that it sees verified",
            "its learning rate is constant: 0.0005 in that training and 0.001 between requests (the"
            " code: at most 5e-5, falling as a cosine, in three epochs)",
            "without a stored head, one learns so from random weights, at first after 32 drafts;"
            " before that, a draft's acceptance probability is its draft probability (at"
            " temperature 0 that of temperature 1); so it is with a draft model that returns no"
            " hidden states",
            "the head reads the last hidden state over the root of its mean square, not after the"
            " model's final norm",
            "the bound is 0.7 (the code's command: 0.3; the paper: a range)",
            "verified token-exactly with shared noise; acceptance='rejection' is the paper's rule",
            "with another rule than token-exact, whose texts depend on the drafts, a head learns"
            " nothing between requests, so that a request's text is the same in any company",
            CHAIN_NOISE,
        ),
        remote={
            "bound": Range(0, 1),
            "min_drafts": Range(1, 64),
            "size": Range(1, 64),
            "rate": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def specdecpp(
    bound: float = 0.7,
    min_drafts: int = 2,
    size: int = 20,
    rate: float = 0.001,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """SpecDec++: adaptive draft lengths.

    Args:
        bound: Probability of a rejection at which drafting stops, between 0 and 1.
        min_drafts: Minimum number of drafts per round.
        size: Maximum number of drafts per round.
        rate: Learning rate of the head; 0, or with another acceptance rule: none is trained, and a
            stored one stays as it is.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if not 0 < bound < 1 or not 1 <= min_drafts <= size:
        raise InvalidRequestError("specdec++ needs 0 < bound < 1 and 1 <= min_drafts <= size")
    rule = acceptance_rule(acceptance)
    drafter = ThresholdDrafter(bound, min_drafts, rate, rule)
    return Speculative(drafter, size, rule)
