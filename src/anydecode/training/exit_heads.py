"""Training of light heads for early exits, as SpecBound needs (arXiv:2604.12247).

The model stays as it is. Each head maps the state of its exit linearly, before the model's own norm
and head, and learns the distributions of the last layer on the model's own answers: the mean over
exits of the Kullback-Leibler divergence. Heads start as the exits of the model itself.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `heads.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_heads import ExitHeads
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.layerskip import states_behind_layers
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class HeadRecipe(AnswerRecipe):
    """How heads are trained.

    Attributes:
    """


class HeadMaps(nn.ModuleDict):
    """The linear map of each exit, by its number of layers; at first all zeros."""

    def __init__(self, exits: Sequence[int], width: int) -> None:
        super().__init__({str(exit): nn.Linear(width, width) for exit in exits})
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def exit_log_probabilities(
    model: Transformer, maps: HeadMaps, tokens: torch.Tensor, is_answer: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Log-probabilities `[rows, vocab]` of the answers' tokens at each exit, and at the last layer.

    Args:
        model: The model.
        maps: The heads.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
    """

    def log_probabilities(states: torch.Tensor) -> torch.Tensor:
        logits = model.transformer["ff_out"](model.transformer["ln_f"](states))
        return functional.log_softmax(logits, -1)

    rows, found = is_answer[:, 1:], list[torch.Tensor]()
    for layer, x in enumerate(states_behind_layers(model, tokens[:, :-1]), 1):
        if str(layer) in maps:
            states = x[rows]
            found.append(log_probabilities(states + maps[str(layer)](states)))
    return found, log_probabilities(x[rows])


def divergence(found: Sequence[torch.Tensor], last: torch.Tensor) -> torch.Tensor:
    """The mean over exits and rows of KL(last layer || exit), in nats."""
    losses = [functional.kl_div(one, last, reduction="batchmean", log_target=True) for one in found]
    return torch.stack(losses).mean()


class HeadRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        exits: Gives the exits of a model by its number of layers, as numbers of layers too.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: There is no exit, there are too few answers, or the folder holds
            another run.
    """

    recipe: HeadRecipe
    differs_in = "other exits or another model"

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: HeadRecipe,
        exits: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__(checkpoint, folder, recipe)
        depth, width = self.model.shape.layers, self.model.shape.width
        self.exits = list(exits(depth))
        if not self.exits or self.exits[0] < 1 or self.exits[-1] >= depth:
            raise InvalidRequestError(
                f"the exits are {self.exits}; allowed are 1 to {depth - 1}, as {checkpoint.name}"
                f" has {depth} layers"
            )
        self.fingerprint = fingerprint_of(self.model)
        self.maps = HeadMaps(self.exits, width)
        self._begin(self.maps.parameters(), [self.fingerprint, self.exits])

    @property
    def file(self) -> Path:
        """The file of the heads."""
        return self.folder / "heads.safetensors"

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/heads/{self.step}")
        texts = padded(self._sample(random))
        return self._learn(divergence(*exit_log_probabilities(self.model, self.maps, *texts)))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss of held-out answers, and how often the most probable token of each exit
        is that of the last layer."""
        totals, loss, count = [0] * len(self.exits), 0.0, 0
        for texts in map(padded, self._held_out_batches()):
            found, last = exit_log_probabilities(self.model, self.maps, *texts)
            loss += len(last) * float(divergence(found, last))
            count += len(last)
            for index, one in enumerate(found):
                totals[index] += int((one.argmax(-1) == last.argmax(-1)).sum())
        agreement = [round(total / count, 4) for total in totals]
        self._record(agreement=agreement, held_out_loss=loss / count)

    def _write(self) -> None:
        self.heads().save(self.file)

    def heads(self) -> ExitHeads:
        """The heads in the engine's format."""
        weights = {name: one.detach().numpy() for name, one in self.maps.named_parameters()}
        return ExitHeads(
            {exit: weights[f"{exit}.weight"] for exit in self.exits},
            {exit: weights[f"{exit}.bias"] for exit in self.exits},
            self.fingerprint,
        )

    def log(self) -> dict[str, Any]:
        return {**super().log(), "exits": self.exits}

    def agreements(self) -> Sequence[list[float]]:
        """The agreement of each exit with the last layer on held-out answers, in the order in which
        it was measured."""
        return [entry["agreement"] for entry in self.history if "agreement" in entry]
