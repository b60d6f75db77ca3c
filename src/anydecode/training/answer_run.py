"""What training runs on a model's own answers share: their recipes, and how they are resumed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair, open_llama
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.nested import answers_to_learn_from
from anydecode.training.run import LossRun, check_budget


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


class AnswerRun(LossRun):
    """A training run in a folder on the model's own answers, an eighth of which is held out.

    Subclasses end their constructor with `_begin`.

    Attributes:
        model: The model.
        pairs: Prompts and answers, the held-out ones first.
        trained: The weights that are trained.
    """

    #: What a run in the folder may differ in, for the error.
    differs_in = "another model"
    pairs: list[Pair]

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: AnswerRecipe) -> None:
        super().__init__(folder, recipe)
        self._recipe, self._checkpoint = recipe, checkpoint
        self.model = open_llama(checkpoint)

    def _begin(self, trained: Iterable[torch.Tensor], settings: list[Any]) -> None:
        """Begin or resume to train some weights.

        Args:
            trained: The weights.
            settings: What a resumed run must have in common with the one before, as plain data.

        Raises:
            InvalidRequestError: There are too few answers, or the folder holds another run.
        """
        recipe = self._recipe
        self.trained, self._settings = list(trained), settings
        self._optimizer = torch.optim.AdamW(
            self.trained, recipe.rate, (0.9, 0.95), weight_decay=0.0
        )
        state = load_state(self.folder / "state.pt")
        if state is None:
            self.pairs = answers_to_learn_from(
                self._checkpoint, recipe.answers, recipe.tokens, recipe.seed
            )
            return
        if state.get("settings") != settings:
            raise InvalidRequestError(
                f"{self.folder} holds a run of {self.differs_in}: give another folder"
            )
        for weight, stored in zip(self.trained, state["trained"], strict=True):
            weight.data.copy_(stored)
        self._optimizer.load_state_dict(state["optimizer"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])

    def _sample(self, random: Random) -> list[Pair]:
        """The texts of a step."""
        trained = self.pairs[len(self._held_out) :]
        return random.sample(trained, min(self._recipe.batch, len(trained)))

    def _learn(self, loss: torch.Tensor) -> float:
        """Take a step down; returns the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._descend(self._optimizer, self.trained, self._recipe.rate)
        return float(loss.detach())

    @property
    def _held_out(self) -> list[Pair]:
        return self.pairs[: max(1, len(self.pairs) // 8)]

    @abstractmethod
    def _evaluate(self) -> None:
        """Record what is measured on the held-out answers."""

    @abstractmethod
    def _write(self) -> None:
        """Write what has been trained."""

    def save(self) -> None:
        """Evaluate, and write the state, the log and what has been trained."""
        self._evaluate()
        state = {
            "trained": [weight.data for weight in self.trained],
            "optimizer": self._optimizer.state_dict(),
            "settings": self._settings,
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        self._write()

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {"recipe": asdict(self._recipe), "steps": self.step, "history": self.history}


_STATE_FIELDS = ("step", "seconds", "history", "pairs")
