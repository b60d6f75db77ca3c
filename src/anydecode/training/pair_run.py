"""Training of a low-rank adapter on texts whose ends are learned.

The adapter (LoRA, Hu et al., arXiv:2106.09685) is trained on every matrix of the layers. A run has
a folder, from which it can be resumed: `state.pt`, `log.json`, and the adapter in PEFT's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair, add_low_rank, open_llama, save_adapter
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.nested import padded
from anydecode.training.run import LossRun, check_budget


@dataclass(frozen=True)
class PairRecipe:
    """How an adapter is trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        rank: The rank of the adapter.
        batch: Rows per step.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    rank: int = 16
    batch: int = 8
    rate: float = 1e-3
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        if min(self.minutes or self.steps or 0, self.rank, self.batch) <= 0:
            raise InvalidRequestError("minutes or steps, rank and batch must be more than 0")


class PairRun(LossRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to adapt.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        make_texts: Makes the rows of a new run, by text: the tokens that a row begins with, and
            those that are learned behind them. An eighth of the texts is held out.
        base: The name of the model that is written beside the adapter.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: There are fewer than two texts, a row is too long, or the folder holds
            another run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: PairRecipe,
        make_texts: Callable[[], list[list[Pair]]],
        base: str,
    ) -> None:
        super().__init__(folder, recipe)
        self.recipe, self.base = recipe, base
        self.model = open_llama(checkpoint)
        torch.manual_seed(recipe.seed)
        self.trained = add_low_rank(self.model, recipe.rank)
        self.optimizer = torch.optim.AdamW(
            self.trained, recipe.rate, (0.9, 0.98), weight_decay=0.01
        )
        state = load_state(folder / "state.pt")
        if state is not None:
            self._restore(state)
            return
        limit = self.model.shape.max_positions
        self.texts = make_texts()
        if len(self.texts) < 2:
            raise InvalidRequestError(f"training needs at least 2 texts, not {len(self.texts)}")
        longest = max(len(start) + len(end) for rows in self.texts for start, end in rows)
        if longest > limit:
            raise InvalidRequestError(f"a row has {longest} tokens; at most {limit} are allowed")

    @property
    def _num_held_out(self) -> int:
        return max(1, len(self.texts) // 8)

    def _loss(self, rows: Sequence[Pair]) -> torch.Tensor:
        """The mean loss of the learned tokens."""
        tokens, is_learned = padded(rows)
        row, column = is_learned[:, 1:].nonzero(as_tuple=True)
        logits = self.model(tokens, causal=True, output_rows=(row, column))
        return functional.cross_entropy(logits, tokens[row, column + 1])

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/pairs/{self.step}")
        rows = [row for text in self.texts[self._num_held_out :] for row in text]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(random.sample(rows, min(self.recipe.batch, len(rows))))
        loss.backward()  # type: ignore[no-untyped-call]
        self._descend(self.optimizer, self.trained, self.recipe.rate)
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out rows."""
        rows = [row for text in self.texts[: self._num_held_out] for row in text]
        return sum(float(self._loss([row])) for row in rows) / len(rows)

    def save(self) -> None:
        """Evaluate, and write the adapter, the state and the log."""
        self._record(held_out={"held out": round(self.evaluate(), 4)})
        save_adapter(self.folder, self.model, self.recipe.rank, self.base)
        state = {
            "trained": [weight.data for weight in self.trained],
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {"recipe": asdict(self.recipe), "steps": self.step, "history": self.history}

    def losses(self) -> list[float]:
        """The held-out losses, in the order in which they were measured."""
        return [entry["held_out"]["held out"] for entry in self.history if "held_out" in entry]

    def _restore(self, state: dict[str, Any]) -> None:
        if [one.shape for one in state["trained"]] != [one.shape for one in self.trained]:
            raise InvalidRequestError(
                f"{self.folder} holds a run of another rank or model: give another folder"
            )
        for weight, stored in zip(self.trained, state["trained"], strict=True):
            weight.data.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])


_STATE_FIELDS = ("step", "seconds", "history", "texts")
