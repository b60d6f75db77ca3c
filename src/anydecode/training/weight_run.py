"""Training runs of weights with one optimizer: how they are resumed and saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from anydecode.errors import InvalidRequestError
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.run import LossRun


class WeightRun(LossRun):
    """A training run in a folder, which has `state.pt` and `log.json`.

    Attributes:
        recipe: How to train: a dataclass with the budget and the peak learning `rate`.
        trained: The weights that are trained.
        optimizer: Takes the steps.
    """

    #: What a run in the folder may differ in, for the error.
    differs_in: ClassVar[str] = "another model"
    #: Attributes that are data of the run, and kept for its resumption.
    data: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, recipe: Any) -> None:
        super().__init__(folder, recipe)
        self.recipe = recipe

    def _resume(
        self, trained: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer, settings: list[Any]
    ) -> bool:
        """Begin to train weights, from the folder's state if there is one.

        Args:
            trained: The weights.
            optimizer: Their optimizer.
            settings: What a resumed run must have in common with the one before, as plain data.

        Returns:
            Whether there was a state, from which `data` is restored too.

        Raises:
            InvalidRequestError: The folder holds another run.
        """
        self.trained, self.optimizer, self._settings = list(trained), optimizer, settings
        state = load_state(self.folder / "state.pt")
        if state is None:
            return False
        if state.get("settings") != settings:
            raise InvalidRequestError(
                f"{self.folder} holds a run of {self.differs_in}: give another folder"
            )
        for weight, stored in zip(self.trained, state["trained"], strict=True):
            weight.data.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in (*_COUNTS, *self.data):
            setattr(self, name, state[name])
        return True

    def _learn(self, loss: torch.Tensor, rate: float | None = None) -> float:
        """Take a step down, at the peak learning rate of the recipe or `rate`; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._descend(self.optimizer, self.trained, self.recipe.rate if rate is None else rate)
        return float(loss.detach())

    @abstractmethod
    def _evaluate(self) -> None:
        """Record what is measured on held-out data."""

    @abstractmethod
    def _write(self) -> None:
        """Write what has been trained."""

    def save(self) -> None:
        """Evaluate, and write the state, the log and what has been trained."""
        self._evaluate()
        state = {
            "trained": [weight.data for weight in self.trained],
            "optimizer": self.optimizer.state_dict(),
            "settings": self._settings,
            **{name: getattr(self, name) for name in (*_COUNTS, *self.data)},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        self._write()

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {"recipe": asdict(self.recipe), "steps": self.step, "history": self.history}


_COUNTS = ("step", "seconds", "history")
