"""Training of a low-rank adapter on texts whose ends are learned.

The adapter (LoRA, Hu et al., arXiv:2106.09685) is trained on every matrix of the layers. A run has
a folder, from which it can be resumed: `state.pt`, `log.json`, and the adapter in PEFT's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair, add_low_rank, open_llama, save_adapter
from anydecode.training.own_answers import padded
from anydecode.training.run import check_budget
from anydecode.training.weight_run import WeightRun


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


class PairRun(WeightRun):
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

    differs_in = "another rank or model"
    data = ("texts",)
    recipe: PairRecipe
    texts: list[list[Pair]]

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: PairRecipe,
        make_texts: Callable[[], list[list[Pair]]],
        base: str,
    ) -> None:
        super().__init__(folder, recipe)
        self.base, self.model = base, open_llama(checkpoint)
        torch.manual_seed(recipe.seed)
        trained = add_low_rank(self.model, recipe.rank)
        optimizer = torch.optim.AdamW(trained, recipe.rate, (0.9, 0.98), weight_decay=0.01)
        if self._resume(trained, optimizer, [list(one.shape) for one in trained]):
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
        return self._learn(self._loss(random.sample(rows, min(self.recipe.batch, len(rows)))))

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out rows."""
        rows = [row for text in self.texts[: self._num_held_out] for row in text]
        return sum(float(self._loss([row])) for row in rows) / len(rows)

    def _evaluate(self) -> None:
        self._record(held_out={"held out": round(self.evaluate(), 4)})

    def _write(self) -> None:
        save_adapter(self.folder, self.model, self.recipe.rank, self.base)

    def losses(self) -> list[float]:
        """The held-out losses, in the order in which they were measured."""
        return [entry["held_out"]["held out"] for entry in self.history if "held_out" in entry]
