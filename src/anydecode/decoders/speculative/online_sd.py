"""Online speculative decoding: a draft model that learns from rejected drafts (Liu et al., "Online
Speculative Decoding", arXiv:2310.07177).

The first rejected draft of each round is stored with the target's distribution. Between requests
the draft model is trained on these examples to match the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    RejectionSampling,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_model import DRAFT, fit_vocab, sampled_chain
from anydecode.errors import InvalidRequestError
from anydecode.kernels.arithmetic import softmax
from anydecode.kernels.library import top_k
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: Number of most probable tokens of the target's distribution that an example keeps.
NUM_TARGET_TOKENS = 16


#: Adam's decay rates of the moments, and the number added to the denominator.
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(eq=False)
class RejectedDraft:
    """A training example from a rejected draft: the draft model's last hidden state `[hidden_size]`
    and logits `[vocab_size]`, and the target's most probable tokens with their probabilities."""

    hidden: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


class Correction:
    """A correction added to the draft model's logits: a low-rank function of its last hidden state,
    zero before training. Trained by Adam (Kingma and Ba, arXiv:1412.6980)."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, rate: float) -> None:
        bound = hidden_size**-0.5
        uniform = np.random.default_rng(0).uniform
        self.rate = rate
        self.parameters = {
            "down": uniform(-bound, bound, (rank, hidden_size)).astype(np.float32),
            "down_bias": uniform(-bound, bound, rank).astype(np.float32),
            "up": np.zeros((vocab_size, rank), np.float32),
            "up_bias": np.zeros(vocab_size, np.float32),
        }
        self._moments = {
            name: (np.zeros_like(value), np.zeros_like(value))
            for name, value in self.parameters.items()
        }
        self._num_steps = 0

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """The correction of the logits, `[..., vocab_size]`, for `hidden` `[..., hidden_size]`."""
        p = self.parameters
        return self._low_rank(self._normed(hidden)) @ p["up"].T + p["up_bias"]

    @staticmethod
    def _normed(hidden: np.ndarray) -> np.ndarray:
        normed: np.ndarray = hidden / np.sqrt((hidden * hidden).mean(-1, keepdims=True) + 1e-6)
        return normed

    def _low_rank(self, normed: np.ndarray) -> np.ndarray:
        low: np.ndarray = normed @ self.parameters["down"].T + self.parameters["down_bias"]
        return low

    def train_steps(self, examples: list[RejectedDraft], steps: int) -> list[float]:
        """Minimise the forward cross-entropy to the target's distributions of `examples`; returns
        the loss before each step, in nats."""
        logits = np.stack([example.logits for example in examples])
        hidden = np.stack([example.hidden for example in examples])
        targets = np.zeros_like(logits)
        for row, example in zip(targets, examples, strict=True):
            row[example.tokens] = example.probabilities
        losses = []
        for _ in range(steps):
            corrected = logits + self(hidden)
            shifted = corrected - corrected.max(-1, keepdims=True)
            log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            losses.append(float(-(targets * log_probabilities).sum(-1).mean()))
            mass = targets.sum(-1, keepdims=True)
            self._step(hidden, (mass * np.exp(log_probabilities) - targets) / len(examples))
        return losses

    def _step(self, hidden: np.ndarray, errors: np.ndarray) -> None:
        """One step of Adam; `errors` is the gradient of the loss in the corrected logits."""
        normed = self._normed(hidden)
        back = errors @ self.parameters["up"]
        gradients = {
            "down": back.T @ normed,
            "down_bias": back.sum(0),
            "up": errors.T @ self._low_rank(normed),
            "up_bias": errors.sum(0),
        }
        self._num_steps += 1
        for name, gradient in gradients.items():
            first, second = self._moments[name]
            first += (1 - _BETA1) * (gradient - first)
            second += (1 - _BETA2) * (gradient * gradient - second)
            mean = first / (1 - _BETA1**self._num_steps)
            variance = second / (1 - _BETA2**self._num_steps)
            self.parameters[name] -= self.rate * mean / (np.sqrt(variance) + _EPSILON)


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
        with_probabilities: bool = False,
    ) -> None:
        if min(rank, batch, steps) < 1 or rate <= 0:
            raise InvalidRequestError("online-sd needs rank, batch, steps >= 1 and rate > 0")
        self.rank = rank
        self.rate = rate
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.with_probabilities = with_probabilities
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
        self.correction.train_steps(self.examples, self.steps)
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
        distributions: list[np.ndarray] | None = [] if self.drafter.with_probabilities else None
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
    has_rows = isinstance(rule, RejectionSampling)
    drafter = OnlineDrafter(rank, rate, batch, steps, with_probabilities=has_rows)
    return Speculative(drafter, size, rule)
