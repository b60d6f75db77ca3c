"""Training of mask tokens at which a model that stays as it is predicts further tokens, with an
adapter for their rows alone and a head that reads the token before, for mtp-future.

Samragh et al., "Your LLM Knows the Future", arXiv:2507.11851. Groups of masks stand behind some
tokens of the model's own answers, see `training/masks.py`. The loss of a mask is the sum of the
cross-entropies of the model's head and of the head that reads the token before, and of the mean
squared distance between its state and that of the text's row that predicts the same token.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and the results,
`future_masks/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.future_masks import (
    FILE_NAME,
    FOLDER_NAME,
    MAX_MASKS,
    NORM_EPS,
    FutureMasks,
    SamplerLayer,
)
from anydecode.training.answer_run import fingerprint_of
from anydecode.training.block_adapter import LowRankLinear, Pair, add_low_rank, save_adapter
from anydecode.training.masks import GroupRecipe, GroupRun, TrainedRows


@dataclass(frozen=True)
class FutureRecipe(GroupRecipe):
    """How masks with an adapter are trained; `rank` is that of the adapter."""

    rank: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank <= 0:
            raise InvalidRequestError("rank must be more than 0")
        if self.masks > MAX_MASKS:
            raise InvalidRequestError(f"masks is {self.masks}; allowed are 1 to {MAX_MASKS}")


@dataclass
class Gate:
    """Which rows of a pass have the adapter: those from `first` on."""

    first: int = 0


class GatedLinear(LowRankLinear):
    """A frozen matrix with a low-rank update in the rows that a gate names."""

    def __init__(self, frozen: nn.Linear, rank: int, gate: Gate) -> None:
        super().__init__(frozen, rank)
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.gate.first
        return torch.cat([self.frozen(x[..., :first, :]), super().forward(x[..., first:, :])], -2)


class SamplerHead(nn.Module):
    """Two layers, norm(silu(linear(x))) each, of an embedding and a state side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(2 * width, width), nn.Linear(width, width)])
        self.norms = nn.ModuleList(nn.LayerNorm(width, NORM_EPS) for _ in range(2))

    def forward(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        x = torch.cat([embedding, state], -1)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(functional.silu(linear(x)))
        return x

    def layer(self, index: int) -> SamplerLayer:
        """One of the layers as it is written."""
        modules: tuple[Any, Any] = (self.linears[index], self.norms[index])
        return SamplerLayer(
            *(weight.detach().numpy() for one in modules for weight in (one.weight, one.bias))
        )


class FutureRun(GroupRun):
    """Trains masks, their adapter and the head of a model that stays as it is; see `GroupRun`."""

    recipe: FutureRecipe

    @property
    def parts_folder(self) -> Path:
        """The folder of the trained masks, adapter and head."""
        return self.folder / FOLDER_NAME

    def _set_up(self) -> list[nn.Parameter]:
        size, masks = self.model.shape.vocab, self.recipe.masks
        self.gate = Gate()
        adapter = add_low_rank(
            self.model, self.recipe.rank, lambda frozen, rank: GatedLinear(frozen, rank, self.gate)
        )
        embedding: Any = self.model.transformer["wte"]
        self.embedding = TrainedRows(embedding.weight.data, size, masks)
        self.model.transformer["wte"] = self.embedding
        self.group = torch.arange(size, size + masks)
        self.head = SamplerHead(self.model.shape.width)
        return [*adapter, self.embedding.rows, *self.head.parameters()]

    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        """The mean loss of a text's masks."""
        text = torch.tensor([*pair[0], *pair[1]])
        clean, masked = self._states(text[:-1], ends)
        total = torch.zeros(())
        for index in range(len(self.group)):
            state, label = masked[:, index], text[ends + index + 1]
            total = total + functional.cross_entropy(self.model.head(state), label)
            total = total + functional.cross_entropy(self._logits(text, ends, state, index), label)
            total = total + functional.mse_loss(state, clean[ends + index].detach())
        return total / len(self.group)

    def _states(self, text: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.gate.first = len(text)
        return super()._states(text, ends)

    def _logits(
        self, text: torch.Tensor, ends: torch.Tensor, state: torch.Tensor, index: int
    ) -> torch.Tensor:
        """The logits of the head that reads the token before, of the masks of one number."""
        return self.model.head(self.head(self.embedding(text[ends + index]), state))

    def _rows(self, pair: Pair, ends: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        text, first = torch.tensor([*pair[0], *pair[1]]), len(pair[0])
        clean, masked = self._states(text[:-1], ends)
        rows = [(self.model.head(clean[first - 1 :]), text[first:])]
        for index in range(len(self.group)):
            logits = self._logits(text, ends, masked[:, index], index)
            rows.append((logits, text[ends + index + 1]))
        return rows

    def _write(self) -> None:
        folder = self.parts_folder
        save_adapter(folder, self.model, self.recipe.rank, self._checkpoint.name)
        masks = self.embedding.rows.detach().numpy()
        fingerprint = fingerprint_of(self.model)
        first, second = self.head.layer(0), self.head.layer(1)
        FutureMasks(masks, first, second, {}, fingerprint).save(folder / FILE_NAME)
