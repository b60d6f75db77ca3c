"""Online speculative decoding: a draft model that learns from rejected drafts (Liu et al., "Online
Speculative Decoding", arXiv:2310.07177).

The first rejected draft of each round is stored with the target's distribution. Between requests
the draft model is trained on these examples to match the target.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_correction import Correction, Loss
from anydecode.decoders.speculative.draft_model import (
    DRAFT,
    distribution_list,
    fit_vocab,
    sampled_chain,
)
from anydecode.errors import InvalidRequestError
from anydecode.kernels.arithmetic import softmax
from anydecode.kernels.library import top_k
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: Number of most probable tokens of the target's distribution that an example keeps.
NUM_TARGET_TOKENS = 16


@dataclass(eq=False)
class RejectedDraft:
    """A training example from a rejected draft: the draft model's last hidden state `[hidden_size]`
    and logits `[vocab_size]`, and the target's most probable tokens with their probabilities."""

    hidden: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


def cross_entropy(examples: Seq[RejectedDraft]) -> Loss:
    """The forward cross-entropy to the target's distributions of `examples`, in nats."""
    targets = np.zeros((len(examples), len(examples[0].logits)), np.float32)
    for row, example in zip(targets, examples, strict=True):
        row[example.tokens] = example.probabilities

    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        shifted = logits - logits.max(-1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        mass = targets.sum(-1, keepdims=True)
        value = float(-(targets * log_probabilities).sum(-1).mean())
        return value, (mass * np.exp(log_probabilities) - targets) / len(examples)

    return loss


class OnlineDrafter(Drafter):
    """Drafts chains with the draft model plus `Correction`. Training runs when a request has ended
    and at least `batch` examples are stored; the last `memory` are kept."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self,
        rank: int,
        rate: float,
        batch: int,
        steps: int,
        memory: int = 64,
        rule: Acceptance | None = None,
    ) -> None:
        if min(rank, batch, steps) < 1 or rate <= 0:
            raise InvalidRequestError("online-sd needs rank, batch, steps >= 1 and rate > 0")
        self.rank = rank
        self.rate = rate
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.rule = rule
        self.examples: list[RejectedDraft] = []
        self.correction: Correction | None = None

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.examples, self.correction = [], None

    def add_example(self, example: RejectedDraft) -> None:
        """Store an example."""
        self.examples = [*self.examples, example][-self.memory :]

    def train(self) -> None:
        """Train on the stored examples if there are at least `batch`."""
        if len(self.examples) < self.batch:
            return
        if self.correction is None:
            first = self.examples[0]
            sizes = len(first.hidden), len(first.logits)
            self.correction = Correction(*sizes, self.rank, self.rate)
        logits = np.stack([example.logits for example in self.examples])
        hidden = np.stack([example.hidden for example in self.examples])
        self.correction.train(hidden, logits, cross_entropy(self.examples), self.steps)
        self.examples = []


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: OnlineDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._drafted: TokenTree | None = None

    def propose(self, size: int) -> Proposal:
        sequence, correction = self.sequence, self.drafter.correction
        sequence.align(DRAFT)
        kv_cache = sequence.kv_cache(DRAFT)
        top = kv_cache.pool.model.spec.num_layers
        sampler, tokens = sequence.sampler.fork(), sequence.all_tokens
        drafts: list[int] = []
        distributions = distribution_list(self.drafter.rule)
        self.rows = []
        for _ in range(size):
            text = (tokens + drafts)[kv_cache.length :]
            scores = yield sequence.score(text, runner=DRAFT, hidden=(top,))
            hidden = scores.hidden[top][-1].copy()
            row = fit_vocab(sequence, scores.row(-1)).copy()
            self.rows.append((hidden, row))
            if correction is not None:
                row = row + correction(hidden)
            token = sequence.sample(sampler, row, len(tokens) + len(drafts))
            if distributions is not None:
                distributions.append(sampler.distribution(row).dense(len(row)))
            sampler.advance(token)
            drafts.append(token)
        self._drafted = sampled_chain(drafts, distributions)
        return self._drafted

    def observe(self, round: SpeculationRound) -> None:
        """Store the first rejected draft of the round; train at the end of the request."""
        position = round.num_accepted
        if round.tree is self._drafted and position < len(round.tree):
            tokens, best = top_k(round.scores.logits[position : position + 1], NUM_TARGET_TOKENS)
            hidden, row = self.rows[position]
            self.drafter.add_example(RejectedDraft(hidden, row, tokens[0], softmax(best[0])))
        if round.sequence.finished:
            self.drafter.train()


@register(
    Card(
        "online-sd",
        "speculative",
        paper="Online Speculative Decoding (arXiv:2310.07177)",
        exactness="token-exact",
        summary="The draft model learns from its rejected drafts between requests.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        missing=(
            "updates of the draft model's own weights: only a low-rank addition to its output"
            " layer is trained, since the weights may be quantised",
        ),
        deviations=(
            "the target's distribution is reduced to its 16 most probable tokens",
            "training runs between requests once `batch` examples are stored, not every few"
            " requests; each example is used for one run of `steps` steps",
            "the loss is forward cross-entropy; other divergences, mixed sampling, training in"
            " advance and routing to drafters by topic are not included",
            "verified token-exactly with shared noise; the paper's rule is acceptance='rejection'",
        ),
        remote={
            "size": Range(0, 64),
            "rank": Range(1, 16),
            "rate": Range(0, 1),
            "batch": Range(1, 16),
            "steps": Range(1, 8),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def online_sd(
    size: int = 4,
    rank: int = 16,
    rate: float = 0.01,
    batch: int = 8,
    steps: int = 4,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Online speculative decoding.

    Args:
        size: Number of drafts per round.
        rank: Rank of the correction.
        rate: Learning rate of Adam.
        batch: Rejected drafts that start a training run.
        steps: Steps per training run.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    rule = acceptance_rule(acceptance)
    drafter = OnlineDrafter(rank, rate, batch, steps, rule=rule)
    return Speculative(drafter, size, rule)
