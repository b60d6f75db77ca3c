"""Training of a model that predicts several tokens at mask tokens behind its text, as SPACE needs.

Yi et al., SPACE, arXiv:2402.11809. Groups of mask tokens stand behind some tokens of an answer; a
mask sees the text up to its group and the masks before it in the group, and predicts the token
after its position. Rows of the text predict the next token as before. All labels have the same
weight. A low-rank adapter (Hu et al., arXiv:2106.09685) and the mask's embedding are trained, and
merged into the model that is written. The texts are the model's own answers.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.block_adapter import (
    Pair,
    add_low_rank,
    choose_mask_token,
    merged_weights,
    open_llama,
)
from anydecode.training.checkpoint import load_state, save_json, save_nested_llama, save_state
from anydecode.training.nested import own_answers
from anydecode.training.run import LossRun
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class MaskRecipe:
    """How a model is trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        masks: Number of masks of a group.
        groups: Maximum number of groups per text and step.
        answers: Number of answers of the model, an eighth of which is held out.
        tokens: Maximum number of tokens of an answer.
        batch: Texts per step.
        rank: Rank of the adapter.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    masks: int = 2
    groups: int = 16
    answers: int = 256
    tokens: int = 64
    batch: int = 4
    rank: int = 16
    rate: float = 1e-3
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidRequestError("training takes either minutes or steps")
        counts = (self.minutes or self.steps or 0, self.masks, self.groups, self.tokens, self.batch)
        if min(*counts, self.rank) <= 0 or self.answers < 2:
            raise InvalidRequestError(
                "minutes or steps, masks, groups, tokens, batch and rank must be more than 0, and"
                " answers 2 or more"
            )


class MaskEmbedding(nn.Module):
    """A frozen embedding whose row of the mask token is trained."""

    def __init__(self, frozen: torch.Tensor, mask: int) -> None:
        super().__init__()
        self.frozen, self.mask = frozen, mask
        self.row = nn.Parameter(frozen.mean(0))

    @property
    def merged(self) -> torch.Tensor:
        """The matrix with the trained row."""
        weight = self.frozen.clone()
        weight[self.mask] = self.row.detach()
        return weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = functional.embedding(tokens, self.frozen)
        return torch.where((tokens == self.mask)[..., None], self.row, embedded)


def group_mask(num_tokens: int, ends: torch.Tensor, masks: int) -> torch.Tensor:
    """bool `[rows, rows]`: which rows (columns) each row attends to. The rows are `num_tokens`
    tokens, then `masks` masks for each group; `ends[group]` is the number of tokens before it."""
    count = num_tokens + masks * len(ends)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    group = torch.arange(len(ends)).repeat_interleave(masks)
    visible[num_tokens:, :num_tokens] = torch.arange(num_tokens) < ends[group][:, None]
    visible[num_tokens:, num_tokens:] &= group[:, None] == group
    return visible


def mask_logits(
    model: Transformer, text: torch.Tensor, ends: torch.Tensor, masks: int, mask: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a text's rows, `[length, vocab]`, and of the masks of groups behind it,
    `[groups, masks, vocab]`.

    Args:
        model: The model.
        text: `[length]`.
        ends: The number of tokens before each group.
        masks: Number of masks of a group.
        mask: The mask token.
    """
    behind = ends[:, None] + torch.arange(masks)
    rows = model(
        torch.cat([text, torch.full((behind.numel(),), mask)])[None],
        positions=torch.cat([torch.arange(len(text)), behind.flatten()]),
        visible=group_mask(len(text), ends, masks),
    )[0]
    return rows[: len(text)], rows[len(text) :].unflatten(0, (len(ends), masks))


class MaskRun(LossRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        mask: The mask token; None: the tokenizer's, or an unused special token.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: There is no token for the mask, the answers are too few or too short,
            or the folder holds another run.
    """

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: MaskRecipe, mask: int | None = None
    ) -> None:
        tokenizer = checkpoint.tokenizer
        if not isinstance(tokenizer, HFTokenizer):
            raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be written")
        super().__init__(folder, recipe)
        self.tokenizer, self.recipe = tokenizer, recipe
        self.mask = choose_mask_token(tokenizer) if mask is None else mask
        self.model = open_llama(checkpoint)
        if not 0 <= self.mask < self.model.shape.vocab:
            raise InvalidRequestError(
                f"the mask token is {self.mask}; allowed are 0 to {self.model.shape.vocab - 1}"
            )
        torch.manual_seed(recipe.seed)
        self.trained = add_low_rank(self.model, recipe.rank)
        embedding: Any = self.model.transformer["wte"]
        self.embedding = MaskEmbedding(embedding.weight.data, self.mask)
        self.model.transformer["wte"] = self.embedding
        self.trained.append(self.embedding.row)
        self.optimizer = torch.optim.AdamW(self.trained, recipe.rate, (0.9, 0.95), weight_decay=0.0)
        state = load_state(folder / "state.pt")
        if state is None:
            answers = own_answers(checkpoint, recipe.answers, recipe.tokens, recipe.seed)
            self.pairs = [pair for pair in answers if len(pair[1]) > recipe.masks]
            if len(self.pairs) < 2:
                raise InvalidRequestError(
                    f"{checkpoint.name} has written {len(self.pairs)} answers of more than"
                    f" {recipe.masks} tokens, and training needs 2: give more answers"
                )
        else:
            self._restore(state)

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def _update(self) -> float:
        recipe, random = self.recipe, Random(f"{self.recipe.seed}/masks/{self.step}")
        trained = self.pairs[self._num_held_out :]
        pairs = random.sample(trained, min(recipe.batch, len(trained)))
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for pair in pairs:
            loss = self.loss(pair, self.draw_ends(pair, random)) / len(pairs)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        for group in self.optimizer.param_groups:
            warmup = min(1.0, (self.step + 1) / 20)
            group["lr"] = recipe.rate * warmup * 0.5 * (1 + math.cos(math.pi * self.progress))
        self.optimizer.step()
        self.step += 1
        return total

    def draw_ends(self, pair: Pair, random: Random) -> torch.Tensor:
        """The number of tokens before each of some groups, whose masks all predict tokens of the
        answer."""
        first, stop = len(pair[0]), len(pair[0]) + len(pair[1]) - self.recipe.masks
        every = range(first, stop)
        return torch.tensor(sorted(random.sample(every, min(self.recipe.groups, len(every)))))

    def _rows(self, pair: Pair, ends: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and labels: of the answer's tokens, then of each mask of the groups."""
        text, first, masks = torch.tensor([*pair[0], *pair[1]]), len(pair[0]), self.recipe.masks
        clean, masked = mask_logits(self.model, text[:-1], ends, masks, self.mask)
        rows = [(clean[first - 1 :], text[first:])]
        return rows + [(masked[:, index], text[ends + index + 1]) for index in range(masks)]

    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        """The mean loss of all labels of a text."""
        rows = self._rows(pair, ends)
        logits, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return functional.cross_entropy(logits, labels)

    @property
    def _num_held_out(self) -> int:
        return max(1, len(self.pairs) // 8)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the shares of held-out labels that are the most probable tokens: of the rows of
        the text, and of each mask."""
        right, count = [0] * (self.recipe.masks + 1), [0] * (self.recipe.masks + 1)
        for pair in self.pairs[: self._num_held_out]:
            ends = torch.arange(len(pair[0]), len(pair[0]) + len(pair[1]) - self.recipe.masks)
            for part, (logits, labels) in enumerate(self._rows(pair, ends)):
                right[part] += int((logits.argmax(-1) == labels).sum())
                count[part] += len(labels)
        text, *held_out = (round(one / total, 4) for one, total in zip(right, count, strict=True))
        self._record(text=text, held_out=held_out)

    def save(self) -> None:
        """Evaluate, and write the state, the log and the model."""
        self._evaluate()
        state = {
            "trained": [weight.data for weight in self.trained],
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        weights = merged_weights(self.model)
        del weights["transformer.wte.row"]
        weights["transformer.wte.weight"] = self.embedding.merged
        save_nested_llama(
            self.model_folder, weights, self.model.shape, self.tokenizer, mask=self.mask
        )

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {
            "recipe": asdict(self.recipe),
            "mask": self.mask,
            "steps": self.step,
            "history": self.history,
        }

    def shares(self) -> Sequence[tuple[float, list[float]]]:
        """The shares of held-out tokens that the text's rows and each mask predict, in the order in
        which they were measured."""
        return [(entry["text"], entry["held_out"]) for entry in self.history if "text" in entry]

    def _restore(self, state: dict[str, Any]) -> None:
        shapes = [one.shape for one in self.trained]
        if [one.shape for one in state["trained"]] != shapes or state["mask"] != self.mask:
            raise InvalidRequestError(
                f"{self.folder} holds a run of another rank, mask or model: give another folder"
            )
        for weight, stored in zip(self.trained, state["trained"], strict=True):
            weight.data.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])


_STATE_FIELDS = ("step", "seconds", "history", "pairs", "mask")
