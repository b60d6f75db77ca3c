"""Training of the head with which `specdec++` stops drafting (Huang et al., "SpecDec++",
arXiv:2405.19715), on the drafts of real rounds.

Each round of an answer drafts a chain; the head learns, from the draft model's last hidden state at
a draft, the probability min(1, p / q) that the rejection rule accepts it. The paper's texts mix the
target's tokens with drafts so that the states are those of a chain, which these are.

A run has a folder, from which it can be resumed: `state.pt`, `log.json` and
`acceptance_head.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.acceptance_head import (
    REJECTION_WEIGHT,
    AcceptanceHead,
    OnlineHead,
)
from anydecode.decoders.speculative.specdecpp import ThresholdDrafter
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.acceptance_head import FILE_NAME, AcceptanceWeights
from anydecode.models.exit_files import model_fingerprint, network_of
from anydecode.scoring.sequence import DRAFT
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.generated import run_requests
from anydecode.training.run import LossRun, check_budget

#: Answers that are generated together.
TOGETHER = 8


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        tokens: Maximum number of tokens of an answer.
        size: Drafts per round.
        temperature: Of the answers.
        batch: Drafts per step.
        rate: Learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    tokens: int = 64
    size: int = 8
    temperature: float = 1.0
    batch: int = 64
    rate: float = 5e-4
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        if min(self.minutes or self.steps or 0, self.tokens, self.batch, self.rate) <= 0:
            raise InvalidRequestError(
                "minutes or steps, tokens, batch and rate must be more than 0"
            )
        if self.size < 2:
            raise InvalidRequestError(
                f"size is {self.size}; allowed is 2 or more, since the last draft of a round is"
                " not learned"
            )


class _Examples(OnlineHead):
    """Collects examples, and is not trained."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.collected: list[tuple[np.ndarray, float]] = []

    def add(self, hidden: np.ndarray, label: float) -> None:
        self.collected.append((hidden, label))

    def train(self) -> None:
        pass


class AcceptanceHeadRun(LossRun):
    """A training run in a folder.

    Args:
        llm: The target, with a draft model that returns hidden states.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        prompts: Prompts of the answers; an eighth of the drafts, those of the first ones, is held
            out.

    Attributes:
        head: The head.
        states, labels: The examples: float32 `[drafts, hidden_size]` and `[drafts]`.

    Raises:
        InvalidRequestError: The folder holds another run, or too few drafts were made.
        UnsupportedCombinationError: The draft model returns no hidden states.
    """

    def __init__(self, llm: LLM, folder: Path, recipe: HeadRecipe, prompts: Seq[Seq[int]]) -> None:
        super().__init__(folder, recipe)
        lacks = "states for an acceptance head, which needs a transformer"
        draft_model: Any = llm.engine.runners[DRAFT].model
        networks = network_of(draft_model, lacks), network_of(llm.model, lacks)
        if not getattr(draft_model, "has_hidden", True):
            raise UnsupportedCombinationError(f"{draft_model.name} has no {lacks}")
        self.llm, self.recipe = llm, recipe
        self.fingerprints = [model_fingerprint(network) for network in networks]
        self._settings = [*self.fingerprints, asdict(recipe), [list(one) for one in prompts]]
        state = load_state(folder / "state.pt")
        if state is not None and state["settings"] != self._settings:
            raise InvalidRequestError(
                f"{folder} holds a run of another model, recipe or prompts: give another folder"
            )
        if state is None:
            self.states, self.labels = self._collect(prompts)
        else:
            self.states, self.labels = state["states"].numpy(), state["labels"].numpy()
        self.head = AcceptanceHead(self.states.shape[1], recipe.rate)
        if state is not None:
            self._restore(state)

    def _collect(self, prompts: Seq[Seq[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The examples of answers to the prompts."""
        recipe, online = self.recipe, _Examples()
        drafter = ThresholdDrafter(1.0, recipe.size, online.rate)  # no chain ends early
        drafter.online = online
        decoder = Speculative(drafter, recipe.size)
        for first in range(0, len(prompts), TOGETHER):
            requests = [
                self.llm.request(
                    list(prompt),
                    decoder=decoder,
                    max_tokens=recipe.tokens,
                    temperature=recipe.temperature,
                    seed=recipe.seed + number,
                )
                for number, prompt in enumerate(prompts[first : first + TOGETHER], first)
            ]
            run_requests(self.llm, requests)
        if len(online.collected) < 16:
            raise InvalidRequestError(
                f"the answers have {len(online.collected)} drafts to learn from; a head needs 16:"
                " give more prompts or tokens"
            )
        states = np.stack([state for state, _ in online.collected])
        return states, np.array([label for _, label in online.collected], np.float32)

    @property
    def path(self) -> Path:
        """The head's file."""
        return self.folder / FILE_NAME

    @property
    def weights(self) -> AcceptanceWeights:
        """The head as it is stored."""
        return AcceptanceWeights(self.head.parameters, *self.fingerprints)

    @property
    def num_held_out(self) -> int:
        """The number of the first examples that are not learned."""
        return len(self.labels) // 8

    def _update(self) -> float:
        random, first = Random(f"{self.recipe.seed}/{self.step}"), self.num_held_out
        count = min(self.recipe.batch, len(self.labels) - first)
        rows = random.sample(range(first, len(self.labels)), count)
        self.step += 1
        return self.head.train(self.states[rows], self.labels[rows], 1)[0]

    def evaluate(self) -> dict[str, float]:
        """On held-out drafts: the weighted cross-entropy, that of the best constant, and the mean
        predictions for the half of the drafts that are least, and most, often accepted."""
        states, labels = self.states[: self.num_held_out], self.labels[: self.num_held_out]
        found, order = self.head(states), np.argsort(labels, kind="stable")
        half = len(order) // 2
        accepted = float(labels.sum())
        constant = accepted / (accepted + REJECTION_WEIGHT * float((1 - labels).sum()))
        return {
            "loss": _loss(found, labels),
            "constant_loss": _loss(np.full(len(labels), constant), labels),
            "less_accepted": float(found[order[:half]].mean()),
            "more_accepted": float(found[order[half:]].mean()),
        }

    def save(self) -> None:
        """Evaluate, and write the state, the log and the head."""
        self._record(held_out=self.evaluate())
        adam = self.head.adam
        tensors = {
            name: torch.from_numpy(np.stack([value, *adam.moments[name]]))
            for name, value in self.head.parameters.items()
        }
        state = {
            "settings": self._settings,
            "states": torch.from_numpy(self.states),
            "labels": torch.from_numpy(self.labels),
            "head": tensors,
            **{name: getattr(self, name) for name in ("step", "seconds", "history")},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        self.weights.save(self.path)

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        adam = self.head.adam
        for name, stored in state["head"].items():
            arrays = self.head.parameters[name], *adam.moments[name]
            for array, values in zip(arrays, stored.numpy(), strict=True):
                array[...] = values
        self.step, self.seconds, self.history = (
            state[name] for name in ("step", "seconds", "history")
        )
        adam.num_steps = self.step

    def log(self) -> dict[str, Any]:
        """Recipe, history and results as plain JSON."""
        return {
            "recipe": asdict(self.recipe),
            "drafts": len(self.labels),
            "accepted": float(self.labels.mean()),
            "steps": self.step,
            "history": self.history,
        }


def _loss(found: np.ndarray, labels: np.ndarray) -> float:
    """The weighted cross-entropy of predictions."""
    logs = labels * np.log(np.maximum(found, 1e-30))
    rejected = REJECTION_WEIGHT * (1 - labels)
    logs = logs + rejected * np.log(np.maximum(1 - found, 1e-30))
    return -float(logs.sum() / (labels + rejected).sum())
