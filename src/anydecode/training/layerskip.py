"""Training of a whole model whose first layers draft well: layer dropout, and losses at the exits.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
arXiv:2404.16710. All exits share the final norm and the head. Dropout and losses are those with
which the paper continues the training of a model: dropout that rises with the steps is for models
that are trained from scratch. The texts are the model's own answers. Row i of a text predicts token
i + 1; rows of prompts have no loss.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.answer_run import AnswerRecipe, AnswerRun
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class LayerSkipRecipe(AnswerRecipe):
    """How a model is trained.

    Attributes:
        dropout: Probability that the last layer is left out for a text; it falls to 0 at the first.
        exit_scale: Weight of the exits, relative to the last layer.
        every: Each step has losses at every so-many-th layer, moved by one from step to step.
    """

    rate: float = 3e-5
    dropout: float = 0.1
    exit_scale: float = 0.2
    every: int = 8
    counts = ("tokens", "batch", "every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout <= 1 or self.exit_scale < 0:
            raise InvalidRequestError("dropout must be from 0 to 1, and exit_scale 0 or more")


def dropout_rates(num_layers: int, rate: float) -> list[float]:
    """The probability with which each layer is left out: 0 at the first, `rate` at the last, and
    exponential between them."""
    growth = math.log(2) / (num_layers - 1)
    return [rate * math.expm1(layer * growth) for layer in range(num_layers)]


def exit_weights(num_layers: int, scale: float, every: int, step: int) -> dict[int, float]:
    """The weight of the loss behind each layer that has one in this step; they sum to 1.

    Layers are counted from 0. Layer i has the weight scale * (1 + ... + i), and the last one, which
    has a loss in every step, L - 1 + scale * (1 + ... + (L - 2)).
    """
    last = num_layers - 1
    weights = {layer: scale * layer * (layer + 1) / 2 for layer in range(step % every, last, every)}
    weights[last] = last + scale * (last - 1) * last / 2
    total = sum(weights.values())
    return {layer: weight / total for layer, weight in weights.items() if weight}


def early_exit_loss(
    model: Transformer,
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
    weights: dict[int, float],
    is_kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum over exits of the cross-entropy of the answers' tokens.

    Args:
        model: The model.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        weights: The weight of the loss behind each layer; see `exit_weights`.
        is_kept: bool `[layers, batch]`: whether a layer runs for a text; None: all do.
    """
    rows, targets = is_answer[:, 1:], tokens[:, 1:][is_answer[:, 1:]]
    total = torch.zeros(())
    for layer, x in enumerate(states_behind_layers(model, tokens[:, :-1], is_kept)):
        if layer in weights:
            logits = model.transformer["ff_out"](model.transformer["ln_f"](x[rows]))
            total = total + weights[layer] * functional.cross_entropy(logits, targets)
    return total


@torch.no_grad()
def agreement(model: Transformer, tokens: torch.Tensor, is_answer: torch.Tensor) -> list[float]:
    """The share of the answers' tokens that each layer predicts as the last one does, without
    dropout."""
    rows = is_answer[:, 1:]
    predicted = [
        model.transformer["ff_out"](model.transformer["ln_f"](x[rows])).argmax(-1)
        for x in states_behind_layers(model, tokens[:, :-1])
    ]
    return [float((one == predicted[-1]).double().mean()) for one in predicted]


def states_behind_layers(
    model: Transformer, tokens: torch.Tensor, is_kept: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Yields the states `[batch, length, width]` behind each layer, of `tokens` `[batch, length]`;
    `is_kept`, bool `[layers, batch]`: whether a layer runs for a text; None: all do."""
    indices = torch.arange(tokens.shape[1])
    rope = model.cos[indices], model.sin[indices]
    x = model.transformer["wte"](tokens)
    for layer, block in enumerate(model.blocks):
        if is_kept is None:
            x = block(x, rope, True, None)
        elif len(index := is_kept[layer].nonzero()[:, 0]):
            x = x.index_copy(0, index, block(x[index], rope, True, None))
        yield x


class LayerSkipRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: The model has one layer only, or the folder holds another run.
    """

    recipe: LayerSkipRecipe

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: LayerSkipRecipe) -> None:
        tokenizer = writable_tokenizer(checkpoint)
        super().__init__(checkpoint, folder, recipe)
        self.tokenizer = tokenizer
        self.model.requires_grad_(True)
        if self.num_layers < 2:
            raise InvalidRequestError(f"{checkpoint.name} has one layer, and no exit before it")
        self._begin(self.model.parameters(), [asdict(self.model.shape)])

    @property
    def num_layers(self) -> int:
        return self.model.shape.layers

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def _update(self) -> float:
        recipe = self.recipe
        random = Random(f"{recipe.seed}/layerskip/{self.step}")
        generator = torch.Generator().manual_seed(random.getrandbits(63))
        tokens, is_answer = padded(self._sample(random))
        rates = torch.tensor(dropout_rates(self.num_layers, recipe.dropout))[:, None]
        is_kept = torch.rand(self.num_layers, len(tokens), generator=generator) >= rates
        weights = exit_weights(self.num_layers, recipe.exit_scale, recipe.every, self.step)
        loss = early_exit_loss(self.model, tokens, is_answer, weights, is_kept)
        return self._learn(loss)

    def _evaluate(self) -> None:
        """Record how well each layer predicts held-out answers: its agreement with the last layer,
        and the loss of the last layer."""
        totals, loss, count = [0.0] * self.num_layers, 0.0, 0
        for texts in map(padded, self._held_out_batches()):
            num_tokens = int(texts[1].sum())
            shares = agreement(self.model, *texts)
            totals = [total + num_tokens * one for total, one in zip(totals, shares, strict=True)]
            with torch.no_grad():
                last = early_exit_loss(self.model, *texts, {self.num_layers - 1: 1.0})
            loss, count = loss + num_tokens * float(last), count + num_tokens
        shares = [round(total / count, 4) for total in totals]
        self._record(agreement=shares, held_out_loss=loss / count)

    def _write(self) -> None:
        save_nested_llama(
            self.model_folder, self.model.state_dict(), self.model.shape, self.tokenizer
        )

    def agreements(self) -> Sequence[list[float]]:
        """The agreement of each layer with the last one on held-out answers, in the order in which
        it was measured."""
        return [entry["agreement"] for entry in self.history if "agreement" in entry]
