"""Training of small networks, one per exit of a frozen model, that say whether a token may leave
there: binary cross-entropy, each step over all rows of the model's own answers.

A run has a folder, from which it can be resumed: `data.pt`, the rows, `state.pt` and `log.json`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_files import model_fingerprint, network_of
from anydecode.training.checkpoint import load_state, save_state
from anydecode.training.generated import rendered_prompt
from anydecode.training.own_answers import prompts_to_answer
from anydecode.training.run import check_budget
from anydecode.training.weight_run import WeightRun

#: The share of the texts that are not trained on.
HELD_OUT = 0.1

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class ExitRecipe:
    """How the networks are trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        width: Inner width of a network.
        answers: Answers of the model.
        tokens: Tokens of an answer.
        rate: Learning rate of Adam.
        threshold: Of the qualities that are recorded.
        seed: Of the answers and the weights.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    width: int = 128
    answers: int = 64
    tokens: int = 96
    rate: float = 1e-3
    threshold: float = 0.85
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        counts = (self.minutes or self.steps or 0, self.width, self.tokens)
        if min(counts) <= 0 or self.answers < 2:
            raise InvalidRequestError(
                "minutes or steps, width and tokens must be more than 0, and answers 2 or more"
            )

    @property
    def target(self) -> str:
        """What the networks learn to predict, if there is a choice."""
        return ""

    @property
    def settings(self) -> list[Any]:
        """What a resumed run must have in common with the one before."""
        return [self.width, self.target]


@dataclass(frozen=True)
class ExitQuality:
    """What a network says of held-out rows at a threshold.

    Attributes:
        exit: Layers before it.
        share: Of rows with a positive label.
        chosen: Share of rows above the threshold.
        precision: Share of positive labels among those; 0 where there are none.
        loss: Nats per row.
    """

    exit: int
    share: float
    chosen: float
    precision: float
    loss: float


@dataclass(frozen=True, eq=False)
class ExitRows:
    """What is learned from.

    Attributes:
        inputs: By number of layers before the exit, float32 `[rows, features]`.
        labels: The same, bool `[rows]`: whether the token may leave.
        num_held_out: Leading rows that are not trained on.
        lengths: Rows of each text, one text after the other; None: not known.
    """

    inputs: dict[int, torch.Tensor]
    labels: dict[int, torch.Tensor]
    num_held_out: int
    lengths: list[int] | None = None


class ExitRun(WeightRun):
    """A training run in a folder.

    Args:
        llm: The model, a transformer or a state-space model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        prompts: User turns to answer; by default the model generates them, if it has a chat
            template.
        report: Called, while rows are collected, with the name of the step and the share of it
            that is done.

    Raises:
        InvalidRequestError: The folder holds a run of another model, or there are too few prompts.
        UnsupportedCombinationError: The model has no layers to leave.
    """

    differs_in = "another model, width or label"
    recipe: ExitRecipe

    def __init__(
        self,
        llm: LLM,
        folder: Path,
        recipe: ExitRecipe,
        prompts: Seq[str] = (),
        report: Report = lambda step, done: None,
    ) -> None:
        super().__init__(folder, recipe)
        self.fingerprint = model_fingerprint(network_of(llm.model, "layers to leave"))
        stored = load_state(folder / "data.pt")
        if stored is None or not (folder / "state.pt").is_file():
            encoded = [rendered_prompt(llm.tokenizer, text) for text in prompts]
            encoded = encoded or prompts_to_answer(llm, recipe.answers, recipe.seed)
            if len(encoded) < 2:
                raise InvalidRequestError("training needs two prompts or more: one is held out")
            self.rows = self._collect(llm, encoded, report)
            save_state(folder / "data.pt", dict(vars(self.rows)))
            (folder / "state.pt").unlink(missing_ok=True)  # of other rows
        else:
            self.rows = ExitRows(**stored)
        torch.manual_seed(recipe.seed)
        self.networks = nn.ModuleDict(
            {str(exit): self._network(one.shape[1]) for exit, one in self.rows.inputs.items()}
        )
        weights = list(self.networks.parameters())
        optimizer = torch.optim.Adam(weights, lr=recipe.rate)
        self._resume(weights, optimizer, [self.fingerprint, *recipe.settings])

    @abstractmethod
    def _collect(self, llm: LLM, prompts: Seq[list[int]], report: Report) -> ExitRows:
        """The rows of the model's answers to `prompts`."""

    @abstractmethod
    def _network(self, num_features: int) -> nn.Module:
        """A new network: logits `[rows, 1]` of features `[rows, num_features]`."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The trained networks' file."""

    def _update(self) -> float:
        total = torch.zeros(())
        for exit in self.rows.inputs:
            total = total + self._loss(exit, slice(self.rows.num_held_out, None))
        self.optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return float(total.detach()) / len(self.networks)

    def _logits(self, exit: int, part: slice) -> torch.Tensor:
        logits: torch.Tensor = self.networks[str(exit)](self.rows.inputs[exit][part])[:, 0]
        return logits

    def _loss(self, exit: int, part: slice) -> torch.Tensor:
        labels = self.rows.labels[exit][part].to(torch.float32)
        return functional.binary_cross_entropy_with_logits(self._logits(exit, part), labels)

    @torch.no_grad()
    def qualities(self) -> list[ExitQuality]:
        """What each network says of held-out rows now."""
        part, found = slice(0, self.rows.num_held_out), []
        for exit in self.rows.inputs:
            labels = self.rows.labels[exit][part]
            chosen = torch.sigmoid(self._logits(exit, part)) > self.recipe.threshold
            precision = float(labels[chosen].double().mean()) if chosen.any() else 0.0
            shares = float(labels.double().mean()), float(chosen.double().mean())
            found.append(ExitQuality(exit, *shares, precision, float(self._loss(exit, part))))
        return found

    def _evaluate(self) -> None:
        self._record(exits=[asdict(one) for one in self.qualities()])
