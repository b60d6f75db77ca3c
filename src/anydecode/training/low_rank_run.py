"""Training of low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) on a model's own answers, which
are merged into the model that is written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch

from anydecode.models.checkpoint import Checkpoint
from anydecode.training.answer_run import AnswerRecipe, AnswerRun
from anydecode.training.block_adapter import Pair, add_low_rank, merged_weights
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer


@dataclass(frozen=True)
class LowRankRecipe(AnswerRecipe):
    """How an adapter is trained.

    Attributes:
        rank: Rank of the adapter.
    """

    rank: int = 16
    counts: ClassVar[tuple[str, ...]] = ("tokens", "batch", "rank")


class LowRankRun(AnswerRun):
    """A training run in a folder: `state.pt`, `log.json`, and `model/`, the model with the adapter.

    Subclasses end their constructor with `_adapt`.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
    """

    recipe: LowRankRecipe

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: LowRankRecipe) -> None:
        tokenizer = writable_tokenizer(checkpoint)
        super().__init__(checkpoint, folder, recipe)
        self.tokenizer = tokenizer

    def _adapt(self, settings: list[Any]) -> None:
        """Begin or resume to train an adapter. `settings`: see `_resume`; the shape of the model
        and the rank are added.

        Raises:
            InvalidRequestError: There are too few answers, or the folder holds another run.
        """
        torch.manual_seed(self.recipe.seed)
        trained = add_low_rank(self.model, self.recipe.rank)
        self._begin(trained, [asdict(self.model.shape), self.recipe.rank, *settings])

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def _write(self) -> None:
        weights, shape = merged_weights(self.model), self.model.shape
        save_nested_llama(self.model_folder, weights, shape, self.tokenizer)


class LowRankTextRun(LowRankRun):
    """A run whose loss is the cross-entropy of the answers' tokens in some pass of the model."""

    #: Names the random numbers of the steps.
    name: ClassVar[str]

    @abstractmethod
    def loss(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, int]:
        """The mean cross-entropy of the answers' tokens, and their number."""

    def _update(self) -> float:
        loss, _ = self.loss(self._sample(Random(f"{self.recipe.seed}/{self.name}/{self.step}")))
        return self._learn(loss)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss of held-out answers."""
        total, count = 0.0, 0
        for loss, num_tokens in map(self.loss, self._held_out_batches()):
            total, count = total + num_tokens * float(loss), count + num_tokens
        self._record(held_out={"answers": total / count})

    def held_out_losses(self) -> Sequence[float]:
        """The losses of held-out answers, in nats per token, in the order in which they were
        measured."""
        return [entry["held_out"]["answers"] for entry in self.history if "held_out" in entry]
