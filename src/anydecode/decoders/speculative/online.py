"""A draft model that keeps learning from what the target corrected (Liu et al., "Online Speculative
Decoding", arXiv:2310.07177)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import top_k
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: The target's likeliest tokens a lesson keeps.
TAUGHT = 16


@dataclass(eq=False)
class Lesson:
    """One place where the draft was wrong: the draft model's last hidden state `[hidden_size]` and
    logits `[vocab_size]`, and the target's likeliest tokens with their probabilities."""

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    shares: torch.Tensor


class Correction(torch.nn.Module):
    """What is added to the draft model's logits: a low-rank function of its last hidden state,
    zero before the first lesson."""

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

    def learn(self, lessons: list[Lesson], steps: int) -> list[float]:
        """Minimise the forward cross-entropy to the target's distribution at the lessons' places;
        the loss before each step, in nats."""
        hidden, logits = (
            torch.stack([getattr(lesson, name) for lesson in lessons])
            for name in ("hidden", "logits")
        )
        losses = []
        for _ in range(steps):
            logs = torch.log_softmax(logits + self(hidden), dim=-1)
            parts = [
                -(lesson.shares * row[lesson.tokens]).sum()
                for lesson, row in zip(lessons, logs, strict=True)
            ]
            loss = torch.stack(parts).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            losses.append(loss.item())
        return losses


class OnlineDrafter(Drafter):
    """Chains from the draft model plus `Correction`. Lessons are learned when a request has ended
    and at least `batch` wait; the last `memory` are kept."""

    runners = (DRAFT,)

    def __init__(self, rank: int, rate: float, batch: int, steps: int, memory: int = 64) -> None:
        if min(rank, batch, steps) < 1 or rate <= 0:
            raise InvalidRequestError("online-sd needs rank, batch, steps >= 1 and rate > 0")
        self.rank = rank
        self.rate = rate
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.lessons: list[Lesson] = []
        self.losses: list[float] = []
        self.correction: Correction | None = None

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.lessons, self.losses, self.correction = [], [], None

    def take(self, lesson: Lesson) -> None:
        """Remember a lesson."""
        self.lessons = [*self.lessons, lesson][-self.memory :]

    def study(self) -> None:
        """Learn what has been collected, if it is enough."""
        if len(self.lessons) < self.batch:
            return
        if self.correction is None:
            first = self.lessons[0]
            sizes = len(first.hidden), len(first.logits)
            self.correction = Correction(*sizes, self.rank, self.rate)
        self.losses += self.correction.learn(self.lessons, self.steps)
        self.lessons = []


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
        sampler, known = sequence.sampler.fork(), sequence.all_tokens
        drafts: list[int] = []
        self.rows = []
        for _ in range(size):
            text = (known + drafts)[context.length :]
            scores = yield sequence.score(text, runner=DRAFT, hidden=(top,))
            hidden = scores.hidden[top][-1].float().clone()
            row = fitted(sequence, scores.row(-1)).copy()
            self.rows.append((hidden, row))
            if correction is not None:
                with torch.no_grad():
                    row = row + correction(hidden).numpy()
            token = sequence.sample(sampler, row, len(known) + len(drafts))
            sampler.advance(token)
            drafts.append(token)
        self._drafted = TokenTree.chain(drafts)
        return self._drafted

    def observe(self, round: SpeculationRound) -> None:
        """The first wrong draft of a round is a lesson; the end of a request is time to study."""
        wrong = round.num_accepted
        if round.tree is self._drafted and wrong < len(round.tree):
            tokens, best = top_k(round.scores.logits[wrong : wrong + 1], TAUGHT)
            hidden, row = self.rows[wrong]
            shares = torch.softmax(torch.from_numpy(best[0]), dim=0)
            taught = torch.from_numpy(tokens[0].astype(np.int64))
            lesson = Lesson(hidden, torch.from_numpy(row), taught, shares)
            self.drafter.take(lesson)
        if round.sequence.finished:
            self.drafter.study()


@register(
    Card(
        "online-sd",
        "speculative",
        paper="Online Speculative Decoding (arXiv:2310.07177)",
        exactness="token-exact",
        summary="The draft model learns from its rejected drafts, between requests.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "what learns is a low-rank correction of the draft model's logits; its own weights,"
            " which may be quantised, stay as they are",
            "the target's distribution is kept for its 16 likeliest tokens",
            "lessons are learned between requests once `batch` of them wait, not every few"
            " requests; each is learned from in one go of `steps` steps",
            "the loss is forward cross-entropy; other divergences, mixed sampling, training ahead"
            " of use and routing to drafters by topic are left out",
            "verified token-exactly with shared noise",
        ),
    )
)
def online_sd(
    size: int = 4, rank: int = 16, rate: float = 0.01, batch: int = 8, steps: int = 4
) -> Speculative:
    """Chains of `size` drafts; `batch` rejected drafts make `steps` steps of Adam."""
    return Speculative(OnlineDrafter(rank, rate, batch, steps), size)
