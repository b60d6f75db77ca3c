"""Sorted fine-tuning: the first layers of a model become a draft model that predicts tokens after
each of several exits.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large
Language Models", arXiv:2407.01955; the loss is that of "Sorted LLaMA", arXiv:2309.08968. All exits
share the final norm and the head, which stays frozen as the embedding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch

from anydecode.decoders.speculative.s2d import NestedDrafter
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.layerskip import early_exit_loss
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class NestedRecipe(AnswerRecipe):
    """How sorted fine-tuning runs.

    Attributes:
        layers: Number of the model's first layers that the draft model has; 0: half of them.
        exits: Exits before the last layer, as fractions of these, rising.
    """

    rate: float = 2e-4
    layers: int = 0
    exits: tuple[float, ...] = (0.5, 0.75)


class NestedRun(AnswerRun):
    """A training run in a folder, which has the draft model too.

    Args:
        checkpoint: The model that the draft model is made of.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Attributes:
        draft: The draft model.
        stops: Its exits, by number of layers, and their number.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: The model has fewer layers, the exits are out of order, or the folder
            holds another run.
    """

    differs_in = "another model, or with other layers or exits"
    recipe: NestedRecipe

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: NestedRecipe) -> None:
        self.tokenizer = writable_tokenizer(checkpoint)
        super().__init__(checkpoint, folder, recipe)
        self.draft = first_layers(self.model, recipe.layers)
        depth = self.draft.shape.layers
        self.stops = [*NestedDrafter(recipe.exits, 0.0).layers(depth), depth]
        trained = [
            *self.draft.transformer["blocks"].parameters(),
            *self.draft.transformer["ln_f"].parameters(),
        ]
        for weight in trained:
            weight.requires_grad_(True)
        self._begin(trained, [asdict(self.model.shape), fingerprint_of(self.model), self.stops])

    def _update(self) -> float:
        tokens, is_answer = padded(self._sample(Random(f"{self.recipe.seed}/nested/{self.step}")))
        return self._learn(sorted_loss(self.draft, tokens, is_answer, self.stops))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss at each exit on held-out answers."""
        totals, count = [0.0] * len(self.stops), 0
        for texts in map(padded, self._held_out_batches()):
            num_tokens = int(texts[1].sum())
            losses = [float(sorted_loss(self.draft, *texts, [stop])) for stop in self.stops]
            totals = [a + num_tokens * b for a, b in zip(totals, losses, strict=True)]
            count += num_tokens
        names = [f"{stop} layers" for stop in self.stops]
        self._record(held_out={n: t / count for n, t in zip(names, totals, strict=True)})

    def _write(self) -> None:
        save_nested_llama(self.folder, self.draft.state_dict(), self.draft.shape, self.tokenizer)


def first_layers(model: Transformer, layers: int) -> Transformer:
    """A model of the first `layers` layers of `model` (0: half of them), with the same weights."""
    depth = model.shape.layers
    layers = layers or (depth + 1) // 2
    if not 1 <= layers <= depth:
        raise InvalidRequestError(f"layers is {layers}; the model has {depth} layers")
    nested = Transformer(replace(model.shape, layers=layers))
    own = nested.state_dict()
    nested.load_state_dict({name: model.state_dict()[name] for name in own})
    return nested.requires_grad_(False)


def sorted_loss(
    model: Transformer, tokens: torch.Tensor, is_answer: torch.Tensor, stops: Sequence[int]
) -> torch.Tensor:
    """The mean over exits of the cross-entropy of the answers' tokens.

    Args:
        model: The draft model.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        stops: The exits, by number of layers.
    """
    weights = {stop - 1: 1 / len(stops) for stop in stops}
    return early_exit_loss(model, tokens, is_answer, weights)
