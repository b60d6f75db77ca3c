"""A drafter during training: what all recipes share, and what each of them defines.

A recipe is a `Learner`: its states, its default settings, and its files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import as_tensor, check_head

#: The loss is KL divergence where few drafts would be accepted and total variation where most
#: would: the weight of the former is exp(-LK_RATE * acceptance) (LK losses, arXiv:2602.23881).
LK_RATE = 3.0


class Drafted(NamedTuple):
    """The states of drafts in a batch.

    Attributes:
        states: For each draft step, what the head reads: `[batch, rows, width]`.
        starts: For each draft step, int64 `[batch, rows]` or `[rows]`: a row drafts behind the
            position `start` + 1, the last token that it knows; step i predicts the token at `start`
            + 2 + i. Rows whose predicted token is not trained have any state.
    """

    states: list[torch.Tensor]
    starts: list[torch.Tensor]


@dataclass
class StepLosses:
    """Sums over the rows of one draft step: their loss, the probability that the draft is accepted
    (the sum of the smaller ones of target's and drafter's probabilities), and their number."""

    loss: torch.Tensor
    accepted: float
    count: int


class Files(NamedTuple):
    """A drafter's config and tensors in the layout in which such drafters are published."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Learner(nn.Module, ABC):
    """A drafter for a target, with its frozen embedding and rows of its frozen head.

    Args:
        target: The target, whose weights it may start with.
        vocabulary: The tokens of the head's rows, ascending.
        depth: Number of tokens that it learns to draft.
        mask: A token that no text has.

    Raises:
        UnsupportedCombinationError: No drafter of this kind can be trained for the target.

    Attributes:
        recipe: The name of the recipe.
        key: The method that drafts with such drafters.
        default_depth: The default of `depth`.
        default_rate: The default of the peak learning rate.
        decoder: Drafts a chain of as many tokens as the place in it says, for the evaluation.
        step_decay: Factor of the loss of each further draft step.
        state_weight: Factor of the distance to the target's states in the loss.
        progress: The share of the training that is done.
    """

    recipe: ClassVar[str]
    key: ClassVar[str] = "eagle"
    default_depth: ClassVar[int]
    default_rate: ClassVar[float]
    decoder: ClassVar[str] = "eagle:size={0},depth={0},width=1"
    step_decay: ClassVar[float] = 0.8
    state_weight: ClassVar[float] = 0.0

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__()
        check_head(target)
        self.vocabulary, self.depth, self.progress = vocabulary, depth, 0.0
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self._rows: torch.Tensor
        self._keep("embedding", as_tensor(target.weights.embedding))
        self._keep("head", as_tensor(target.weights.head)[vocabulary].clone())
        self.width, self.num_tokens = target.spec.hidden_size, target.spec.vocab_size
        self._keep("_rows", torch.full((self.num_tokens,), -1))
        self._rows[vocabulary] = torch.arange(len(vocabulary))

    def _keep(self, name: str, values: torch.Tensor) -> None:
        """Keep what is not trained, and not in the state: it moves to the device of the rest."""
        self.register_buffer(name, values, persistent=False)

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        """The states of the target that are read beside the last, by number of layers.

        Raises:
            UnsupportedCombinationError: The target has too few layers.
        """
        return ()

    @abstractmethod
    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """The states of `depth` draft steps. `random` is for what a step of the training chooses at
        random."""

    @abstractmethod
    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        """The trained drafter; `target` is the target's config, `has_head` whether the rows of the
        head are among the tensors."""

    @property
    def max_drafts(self) -> int | None:
        """The largest number of tokens that it can draft; None for any number."""
        return None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Float32 `[rows, head rows]` of `states` `[rows, width]`, whose predicted tokens follow
        the tokens `previous` `[rows]`."""
        return functional.linear(states, self.head).float()

    def extra_loss(
        self,
        states: torch.Tensor,
        final: torch.Tensor,
        previous: torch.Tensor,
        acceptance: torch.Tensor,
    ) -> torch.Tensor | None:
        """What is added to the loss of the rows of one step, `[rows]`: here the distance to the
        target's states, which the head reads too.

        Args:
            states: Of the drafter, `[rows, width]`.
            final: Of the target where it predicts the same tokens, `[rows, width]`.
            previous: The tokens before the predicted ones, `[rows]`.
            acceptance: The probabilities that the drafts are accepted, `[rows]`.
        """
        if not self.state_weight:
            return None
        distance = functional.smooth_l1_loss(states.float(), final, reduction="none")
        return self.state_weight * distance.mean(-1)

    def row_losses(
        self, log_p: torch.Tensor, log_q: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the rows of one step, and, without a gradient, the probabilities that their
        drafts are accepted; both `[rows]`.

        Args:
            log_p: The target's log-probabilities, `[rows, head rows]`.
            log_q: The drafter's, `[rows, head rows]`.
            labels: The head's rows of the texts' tokens, `[rows]`.
        """
        return draft_losses(log_p, log_q)

    def losses(self, batch: DraftBatch, random: torch.Generator) -> list[StepLosses]:
        """The losses of `depth` draft steps. Tokens that the head has not cannot be drafted: their
        positions are left out."""
        drafted = self.draft(batch, random)
        labels = self._rows[batch.tokens.roll(-1, 1)]
        trained = batch.is_answer & (labels >= 0)
        with torch.no_grad():
            teacher = functional.linear(batch.final[trained], self.head).float().log_softmax(-1)
        texts = torch.arange(len(batch.tokens))[:, None]
        rows = torch.full(trained.shape, -1)
        rows[trained] = torch.arange(len(teacher))
        rows = functional.pad(rows, (0, self.depth + 1), value=-1)
        losses = []
        for step, (states, starts) in enumerate(zip(*drafted, strict=True)):
            positions = (starts + 1 + step).expand(states.shape[:2])
            own = rows[texts, positions]
            chosen = own >= 0
            at = texts.expand_as(positions)[chosen], positions[chosen]
            previous, final = batch.tokens[at], batch.final[at]
            log_q = self.logits(states[chosen], previous).log_softmax(-1)
            loss, acceptance = self.row_losses(teacher[own[chosen]], log_q, labels[at])
            extra = self.extra_loss(states[chosen], final, previous, acceptance)
            if extra is not None:
                loss = loss + extra
            losses.append(StepLosses(loss.sum(), float(acceptance.sum()), len(loss)))
        return losses


def draft_losses(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of drafts with the target's and the drafter's log-probabilities `[rows, tokens]`,
    and, without a gradient, the probabilities that they are accepted; both `[rows]`."""
    p, q = log_p.exp(), log_q.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    weight = torch.exp(-LK_RATE * acceptance.detach())
    return weight * divergence + (1 - weight) * (1 - acceptance), acceptance.detach()


def spread_taps(num_layers: int) -> tuple[int, ...]:
    """Three states of the target, low, middle and high: those of EAGLE-3."""
    if num_layers < 6:
        raise UnsupportedCombinationError(
            f"the drafter reads states of three layers of a model with at least 6, not {num_layers}"
        )
    return 2, num_layers // 2, num_layers - 3


def vocabulary_tensors(vocabulary: list[int], num_tokens: int) -> dict[str, torch.Tensor]:
    """The tokens of a head's rows, as the layouts of EAGLE-3 and speculators tell them: offsets
    from the row's number, and which of all tokens are there."""
    tokens = torch.tensor(vocabulary)
    kept = torch.zeros(num_tokens, dtype=torch.bool)
    kept[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": kept}
