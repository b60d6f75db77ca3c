"""What training runs on a model's own answers share: their recipes and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_files import fingerprint
from anydecode.training.block_adapter import Pair, open_llama
from anydecode.training.own_answers import answers_to_learn_from
from anydecode.training.run import check_budget
from anydecode.training.transformer import Transformer
from anydecode.training.weight_run import WeightRun


def fingerprint_of(model: Transformer) -> str:
    """See `model_fingerprint`."""
    shape, norm = model.shape, model.state_dict()["transformer.ln_f.weight"]
    return fingerprint(shape.layers, shape.width, shape.vocab, norm.numpy())


@dataclass(frozen=True)
class AnswerRecipe:
    """How a run trains on the model's own answers. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        answers: Number of answers of the model, an eighth of which is held out.
        tokens: Maximum number of tokens of an answer.
        batch: Texts per step.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    answers: int = 256
    tokens: int = 64
    batch: int = 4
    rate: float = 1e-3
    seed: int = 0
    save_seconds: float = 300.0
    #: Attributes that must be more than 0.
    counts: ClassVar[tuple[str, ...]] = ("tokens", "batch")

    def __post_init__(self) -> None:
        check_budget(self)
        values = [getattr(self, name) for name in self.counts]
        if min(self.minutes or self.steps or 0, *values) <= 0 or self.answers < 2:
            names = ", ".join(["minutes or steps", *self.counts[:-1]])
            raise InvalidRequestError(
                f"{names} and {self.counts[-1]} must be more than 0, and answers 2 or more"
            )


class AnswerRun(WeightRun):
    """A training run in a folder on the model's own answers, an eighth of which is held out.

    Subclasses end their constructor with `_begin`.

    Attributes:
        model: The model.
        pairs: Prompts and answers, the held-out ones first.
    """

    data: ClassVar[tuple[str, ...]] = ("pairs",)
    recipe: AnswerRecipe
    pairs: list[Pair]

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: AnswerRecipe) -> None:
        super().__init__(folder, recipe)
        self._checkpoint, self.model = checkpoint, open_llama(checkpoint)

    def _begin(self, trained: Iterable[torch.Tensor], settings: list[Any]) -> None:
        """Begin or resume to train weights: see `_resume`. Raises `InvalidRequestError` too if
        there are too few answers."""
        weights = list(trained)
        optimizer = torch.optim.AdamW(weights, self.recipe.rate, (0.9, 0.95), weight_decay=0.0)
        if not self._resume(weights, optimizer, settings):
            self.pairs = self._new_pairs(self._checkpoint)

    def _new_pairs(self, checkpoint: Checkpoint) -> list[Pair]:
        """The prompts and answers of a new run."""
        recipe = self.recipe
        return answers_to_learn_from(checkpoint, recipe.answers, recipe.tokens, recipe.seed)

    def _sample(self, random: Random) -> list[Pair]:
        """The texts of a step."""
        trained = self.pairs[len(self._held_out) :]
        return random.sample(trained, min(self.recipe.batch, len(trained)))

    @property
    def _held_out(self) -> list[Pair]:
        return self.pairs[: max(1, len(self.pairs) // 8)]

    def _held_out_batches(self) -> Iterator[list[Pair]]:
        """The held-out texts, as many at a time as a step has."""
        held_out, size = self._held_out, self.recipe.batch
        return (held_out[start : start + size] for start in range(0, len(held_out), size))
