"""Online speculative decoding: a draft model that learns from rejected drafts (Liu et al., "Online
Speculative Decoding", arXiv:2310.07177).

The first rejected draft of each round is stored with the target's distribution. Between requests
the draft model is trained on these examples to match the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_model import DRAFT, fit_vocab
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import top_k
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: Number of most probable tokens of the target's distribution that an example keeps.
NUM_TARGET_TOKENS = 16


@dataclass(eq=False)
class RejectedDraft:
    """A training example from a rejected draft: the draft model's last hidden state `[hidden_size]`
    and logits `[vocab_size]`, and the target's most probable tokens with their probabilities."""

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    probabilities: torch.Tensor


class Correction(torch.nn.Module):
    """A correction added to the draft model's logits: a low-rank function of its last hidden state,
    zero before training."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, rate: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.down = torch.nn.Linear(hidden_size, rank)
            self.up = torch.nn.Linear(rank, vocab_size)
        torch.nn.init.zeros_(self.up.weight)
        torch.nn.init.zeros_(self.up.bias)
        self.optimiser = torch.optim.Adam(self.parameters(), rate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = hidden.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        corrected: torch.Tensor = self.up(self.down(hidden * scale))
        return corrected

    def train_steps(self, examples: list[RejectedDraft], steps: int) -> list[float]:
        """Minimise the forward cross-entropy to the target's distributions of `examples`; returns
        the loss before each step, in nats."""
        hidden, logits = (
            torch.stack([getattr(example, name) for example in examples])
            for name in ("hidden", "logits")
        )
        losses = []
        for _ in range(steps):
            log_probabilities = torch.log_softmax(logits + self(hidden), dim=-1)
            cross_entropies = [
                -(example.probabilities * row[example.tokens]).sum()
                for example, row in zip(examples, log_probabilities, strict=True)
            ]
            loss = torch.stack(cross_entropies).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            losses.append(loss.item())
        return losses


class OnlineDrafter(Drafter):
    """Drafts chains with the draft model plus `Correction`. Training runs when a request has ended
    and at least `batch` examples are stored; the last `memory` are kept."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(self, rank: int, rate: float, batch: int, steps: int, memory: int = 64) -> None:
        if min(rank, batch, steps) < 1 or rate <= 0:
            raise InvalidRequestError("online-sd needs rank, batch, steps >= 1 and rate > 0")
        self.rank = rank
        self.rate = rate
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.examples: list[RejectedDraft] = []
        self.losses: list[float] = []
        self.correction: Correction | None = None

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.examples, self.losses, self.correction = [], [], None

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
        self.losses += self.correction.train_steps(self.examples, self.steps)
        self.examples = []


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: OnlineDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.rows: list[tuple[torch.Tensor, np.ndarray]] = []
        self._drafted: TokenTree | None = None

    def propose(self, size: int) -> Proposal:
        sequence, correction = self.sequence, self.drafter.correction
        sequence.align(DRAFT)
        context = sequence.context(DRAFT)
        top = context.pool.model.spec.num_layers
        sampler, tokens = sequence.sampler.fork(), sequence.all_tokens
        drafts: list[int] = []
        self.rows = []
        for _ in range(size):
            text = (tokens + drafts)[context.length :]
            scores = yield sequence.score(text, runner=DRAFT, hidden=(top,))
            hidden = scores.hidden[top][-1].float().clone()
            row = fit_vocab(sequence, scores.row(-1)).copy()
            self.rows.append((hidden, row))
            if correction is not None:
                with torch.no_grad():
                    row = row + correction(hidden).numpy()
            token = sequence.sample(sampler, row, len(tokens) + len(drafts))
            sampler.advance(token)
            drafts.append(token)
        self._drafted = TokenTree.chain(drafts)
        return self._drafted

    def observe(self, round: SpeculationRound) -> None:
        """Store the first rejected draft of the round; train at the end of the request."""
        position = round.num_accepted
        if round.tree is self._drafted and position < len(round.tree):
            tokens, best = top_k(round.scores.logits[position : position + 1], NUM_TARGET_TOKENS)
            hidden, row = self.rows[position]
            probabilities = torch.softmax(torch.from_numpy(best[0]), dim=0)
            token_ids = torch.from_numpy(tokens[0].astype(np.int64))
            example = RejectedDraft(hidden, torch.from_numpy(row), token_ids, probabilities)
            self.drafter.add_example(example)
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
        deviations=(
            "a low-rank correction of the draft model's logits is trained; the model's own"
            " weights, which may be quantised, do not change",
            "the target's distribution is reduced to its 16 most probable tokens",
            "training runs between requests once `batch` examples are stored, not every few"
            " requests; each example is used for one run of `steps` steps",
            "the loss is forward cross-entropy; other divergences, mixed sampling, training in"
            " advance and routing to drafters by topic are not included",
            "verified token-exactly with shared noise",
        ),
    )
)
def online_sd(
    size: int = 4, rank: int = 16, rate: float = 0.01, batch: int = 8, steps: int = 4
) -> Speculative:
    """Online speculative decoding.

    Args:
        size: Number of drafts per round.
        rank: Rank of the correction.
        rate: Learning rate of Adam.
        batch: Rejected drafts that start a training run.
        steps: Steps per training run.
    """
    return Speculative(OnlineDrafter(rank, rate, batch, steps), size)
