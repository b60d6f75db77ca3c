"""Online speculative decoding: a draft model that learns from rejected drafts (Liu et al., "Online
Speculative Decoding", arXiv:2310.07177).

The first rejected draft of each round is stored with the target's distribution. Between requests
the draft model is trained on these examples to match the target: its own weights, if they are
floating point numbers, or else a low-rank addition to its output layer.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_correction import Correction
from anydecode.decoders.speculative.rejected_drafts import (
    RejectedDraft,
    WeightUpdates,
    cross_entropy,
)
from anydecode.decoders.speculative.routed_drafters import NUM_COMPARED, RoutedDrafter
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.arithmetic import softmax
from anydecode.kernels.library import top_k
from anydecode.models.transformer import Transformer
from anydecode.models.weight_training import can_train, num_parameters
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import TokenTree

#: Number of most probable tokens of the target's distribution that an example keeps.
NUM_TARGET_TOKENS = 16
#: Maximum number of tokens that a training run reads before the last rejected draft of a text.
MAX_CONTEXT = 512
#: Draft models of up to so many weights train these by default: a run takes about a second, and 16
#: bytes per weight.
MAX_TRAINED = 20_000_000
#: What is trained: the draft model's weights or the correction of its logits; "auto": the weights
#: of a draft model that `can_train`, of up to `MAX_TRAINED` weights.
CHOICES = ("auto", "weights", "correction")


class OnlineDrafter(Drafter):
    """Drafts chains with the draft model, whose weights are trained, or to whose logits a trained
    `Correction` is added. Training runs when a request has ended and at least `batch` examples are
    stored; the last `memory` are kept. `choice` is one of `CHOICES`. Where the text depends on what
    is drafted, a correction of a request's own is trained while it runs. `runner` is that of the
    draft model."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self,
        rank: int,
        rate: float,
        batch: int,
        steps: int,
        memory: int = 64,
        rule: Acceptance | None = None,
        choice: str = "auto",
        weight_rate: float = 0.001,
        runner: str = DRAFT,
    ) -> None:
        if min(rank, batch, steps) < 1 or min(rate, weight_rate) <= 0:
            raise InvalidRequestError("online-sd needs rank, batch, steps >= 1 and rates > 0")
        if choice not in CHOICES:
            raise InvalidRequestError(f"train is {choice!r}; choose from {', '.join(CHOICES)}")
        self.rank = rank
        self.rate = rate
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.rule = rule
        self.learns_alone = not is_token_exact(rule)
        self.examples: list[RejectedDraft] = []
        self.correction: Correction | None = None
        self.choice = choice
        self.weight_rate = weight_rate
        self.runner = runner
        self._weights: WeightUpdates | None = None

    def trains_weights(self, sequence: Sequence) -> bool:
        """Whether the draft model's own weights are trained: not in the namespaces of a server or
        for one request, since all share the draft model, and not if it is the target itself."""
        model = sequence.model(self.runner)
        if self.choice == "correction" or self.learns_alone or model is sequence.model():
            return False
        if sequence.namespace is not None or not can_train(model):
            return False
        assert isinstance(model, Transformer), "checked by `can_train`"
        return self.choice == "weights" or num_parameters(model) <= MAX_TRAINED

    def prepare(self, sequence: Sequence) -> None:
        if self.choice == "weights" and not self.trains_weights(sequence):
            raise UnsupportedCombinationError(
                "train=weights needs a draft model of its own with attention, RMS norms and gated"
                " MLPs in float32 or bfloat16, no namespace, and token-exact acceptance;"
                " train=correction works with any"
            )

    def on(self, runner: str) -> OnlineDrafter:
        """A drafter with another draft model, which has learned nothing."""
        other = deepcopy(self)
        other.clear()
        other.runner = runner
        other.requirements = replace(self.requirements, runners=(runner,))
        return other

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        if self._weights is not None:
            self._weights.reset()
        self.examples, self.correction, self._weights = [], None, None

    @property
    def num_bytes(self) -> int:
        weights = 0 if self._weights is None else self._weights.num_bytes
        added = 0 if self.correction is None else self.correction.num_bytes
        examples = sum(4 * len(one.logits) + 8 * len(one.text) for one in self.examples)
        return weights + added + examples

    def add_example(self, example: RejectedDraft) -> None:
        """Store an example."""
        self.examples = [*self.examples, example][-self.memory :]

    def train(self, model: Transformer | None = None) -> None:
        """Train on the stored examples if there are at least `batch`: the weights of `model`, or
        the correction without one."""
        if len(self.examples) < self.batch:
            return
        if model is not None:
            if self._weights is None:
                self._weights = WeightUpdates(model, self.weight_rate)
            self._weights.train(self.examples, self.steps)
            self.examples = []
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
        self._num_tokens = 0  # of the text when the last draft was made
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._drafted: TokenTree | None = None

    def propose(self, size: int) -> Proposal:
        sequence, correction, runner = self.sequence, self.drafter.correction, self.drafter.runner
        sequence.align(runner)
        kv_cache = sequence.kv_cache(runner)
        top = kv_cache.pool.model.spec.num_layers
        sampler, tokens = sequence.sampler.fork(), sequence.all_tokens
        drafts: list[int] = []
        distributions = distribution_list(self.drafter.rule)
        self.rows, self._num_tokens = [], len(tokens)
        for _ in range(size):
            text = (tokens + drafts)[kv_cache.length :]
            scores = yield sequence.score(text, runner=runner, hidden=(top,))
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
        """Store the first rejected draft of the round; train at the end of the request, or after
        each round on a request's own drafts. Drafts that the pass has left out are drafted again
        after the same text, and tested then, so that they are missing from no example."""
        drafted, self._drafted = self._drafted, None
        position, num_tested = (0, 0) if drafted is None else round.tested(drafted)
        if position < num_tested:
            tokens, best = top_k(round.scores.logits[position : position + 1], NUM_TARGET_TOKENS)
            hidden, row = self.rows[position]
            place, sequence = self._num_tokens + position, round.sequence
            text = sequence.all_tokens[max(0, place - MAX_CONTEXT) : place]
            probabilities = softmax(best[0])
            self.drafter.add_example(
                RejectedDraft(hidden, row, tokens[0], probabilities, sequence.id, text, place)
            )
        if round.sequence.finished or self.drafter.learns_alone:
            trains_weights = self.drafter.trains_weights(round.sequence)
            model: Any = round.sequence.model(self.drafter.runner)
            self.drafter.train(model if trains_weights else None)


@register(
    Card(
        "online-sd",
        "speculative",
        paper="Online Speculative Decoding (arXiv:2310.07177)",
        exactness="token-exact",
        summary="The draft model learns from its rejected drafts between requests.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "4 drafts by default (the released code: 5)",
            "the draft model's own weights are trained if they are floating point numbers of a"
            " transformer with attention, RMS norms and gated MLPs, by default if there are at most"
            " 20 million, and without a namespace; otherwise, a low-rank addition to its output"
            " layer, since the weights of a quantised model cannot be changed in small steps. Other"
            " methods that draft with this model have the trained weights too",
            "at most 512 tokens before the last rejected draft of a text are read in training, and"
            " what the draft model's cache has of the old weights stays",
            "the target's distribution is reduced to its 16 most probable tokens",
            "training runs between requests once `batch` examples are stored, not every few"
            " requests; each example is used for one run of `steps` steps",
            "one draft model by default. With route=true, each of several learns from the requests"
            f" that it drafts for: those whose last {NUM_COMPARED} prompt tokens it predicts better"
            " than the others do (the paper: those that a trained classifier gives its topic)",
            "the loss is forward cross-entropy; other divergences, mixed sampling and training in"
            " advance are not included",
            "verified token-exactly with shared noise; the paper's rule is acceptance='rejection'",
            "with another rule than token-exact, whose texts depend on the drafts, an addition to"
            " the output layer learns from the request alone, while it runs, so that its text is"
            " the same in any company",
            CHAIN_NOISE,
        ),
        remote={
            "size": Range(1, 64),
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
    train: str = "auto",
    weight_rate: float = 0.001,
    route: bool = False,
) -> Speculative:
    """Online speculative decoding.

    Args:
        size: Number of drafts per round.
        rank: Rank of the correction of the output layer.
        rate: Learning rate of Adam for the correction.
        batch: Rejected drafts that start a training run.
        steps: Steps per training run.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
        train: "weights" for the draft model's own weights, "correction" for the output layer's, or
            "auto".
        weight_rate: Learning rate of Adam for the draft model's own weights.
        route: Whether each request is routed, by its topic, to one of several draft models.
    """
    rule = acceptance_rule(acceptance)
    drafter: Drafter = OnlineDrafter(
        rank, rate, batch, steps, rule=rule, choice=train, weight_rate=weight_rate
    )
    if route:
        drafter = RoutedDrafter(drafter)
    return Speculative(drafter, size, rule)
