"""Training of the maps that predict, from a token's state at a layer of a model that stays as it
is, those of the tokens behind it, for hidden-transfer.

Wu et al., arXiv:2404.12022. Groups of pseudo states stand behind some tokens of the model's own
answers, see `training/masks.py`. The maps begin as the ridge regression of later states at their
layer, and learn the distributions of the text's rows.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and the result,
`hidden_transfer.safetensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.hidden_transfer import FILE_NAME, MAX_MAPS, HiddenTransfer
from anydecode.training.answer_run import fingerprint_of
from anydecode.training.masks import RANKS, DistilledRun, GroupRecipe, group_mask
from anydecode.training.transformer import Transformer

#: The regression's penalty, as a share of the mean square of the states' numbers.
RIDGE = 0.01


@dataclass(frozen=True)
class TransferRecipe(GroupRecipe):
    """How maps are trained; `masks` is the number of pseudo states of a group.

    Attributes:
        layers: The number of layers before each pseudo state, not falling; empty: two thirds of
            the model's for each of `masks`.
    """

    rate: float = 3e-4
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masks > MAX_MAPS or len(self.layers) not in (0, self.masks):
            raise InvalidRequestError(
                f"there are {self.masks} pseudo states with {len(self.layers)} layers; allowed are"
                f" 1 to {MAX_MAPS}, with as many layers or none"
            )
        if list(self.layers) != sorted(self.layers) or min(self.layers, default=0) < 0:
            raise InvalidRequestError(
                f"layers is {self.layers}; allowed are numbers from 0 that do not fall"
            )

    def layers_of(self, depth: int) -> list[int]:
        """The number of layers before each pseudo state, of a model with `depth` layers."""
        layers = list(self.layers) or [depth * 2 // 3] * self.masks
        if layers[-1] >= depth:
            raise InvalidRequestError(
                f"the layers are {layers}; allowed are 0 to {depth - 1}, as the model has {depth}"
            )
        return layers


class Maps(nn.Module):
    """A model in which pseudo states join the rows of a text at intermediate layers."""

    def __init__(self, model: Transformer, layers: list[int]) -> None:
        super().__init__()
        self.layers = layers
        width = model.shape.width
        self.maps = nn.ParameterList(torch.eye(width) for _ in layers)

    def states(
        self, model: Transformer, text: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states after the final norm of a text's rows, `[length, width]`, and of the pseudo
        states behind it, `[groups, count, width]`; `ends[group]` is the number of tokens before
        each."""
        length, count = len(text), len(self.layers)
        positions = torch.cat([torch.arange(length), *(ends + index for index in range(count))])
        # The rows of a number stand together; those of `group_mask` are group by group.
        by_number = torch.arange(count * len(ends)).reshape(len(ends), count).T.flatten() + length
        order = torch.cat([torch.arange(length), by_number])
        visible = group_mask(length, ends, count)[order][:, order]
        x, done = model.transformer["wte"](text)[None], 0
        for map, layer in zip(self.maps, self.layers, strict=True):
            x, done = self._run(model, x, positions, visible, done, layer), layer
            x = torch.cat([x, x[:, ends - 1] @ map.T], 1)
        x = self._run(model, x, positions, visible, done, model.shape.layers)
        rows: torch.Tensor = model.transformer["ln_f"](x)[0]
        return rows[:length], rows[length:].reshape(count, len(ends), -1).transpose(0, 1)

    @staticmethod
    def _run(
        model: Transformer,
        x: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        first: int,
        last: int,
    ) -> torch.Tensor:
        count = x.shape[1]
        rope = model.cos[positions[:count]], model.sin[positions[:count]]
        for block in model.blocks[first:last]:
            x = block(x, rope, False, visible[:count, :count])
        return x

    @torch.no_grad()
    def fit(self, model: Transformer, texts: list[list[int]]) -> None:
        """Set each map to the ridge regression, over texts, of the states behind a token at the
        map's layer on those of the token."""
        width = model.shape.width
        sums = [torch.zeros(2, width, width, dtype=torch.double) for _ in self.layers]
        for text in texts:
            x, done = model.transformer["wte"](torch.tensor([text])), 0
            positions = torch.arange(len(text))
            visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            for index, layer in enumerate(self.layers):
                x, done = self._run(model, x, positions, visible, done, layer), layer
                inputs, outputs = x[0, : -index - 1].double(), x[0, index + 1 :].double()
                sums[index] += torch.stack([inputs.T @ inputs, outputs.T @ inputs])
        for map, (square, cross) in zip(self.maps, sums, strict=True):
            penalty = RIDGE * square.diagonal().mean() * torch.eye(width, dtype=torch.double)
            map.copy_(torch.linalg.solve(square + penalty, cross, left=False).float())


class TransferRun(DistilledRun):
    """Trains the maps of a model that stays as it is; see `DistilledRun`."""

    recipe: TransferRecipe

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: TransferRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        if not self.step:
            trained = self.pairs[len(self._held_out) :]
            self.maps.fit(self.model, [[*prompt, *answer] for prompt, answer in trained])

    @property
    def file(self) -> Path:
        """The file of the maps."""
        return self.folder / FILE_NAME

    def _set_up(self) -> list[nn.Parameter]:
        self.maps = Maps(self.model, self.recipe.layers_of(self.model.shape.layers))
        self.group = torch.tensor(self.maps.layers)
        return list(self.maps.parameters())

    def _states(self, text: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.maps.states(self.model, text, ends)

    def _write(self) -> None:
        maps: Any = torch.stack([map.detach() for map in self.maps.maps])
        accuracies: Any = torch.tensor(self.accuracies(RANKS)[1:])
        HiddenTransfer(
            maps.numpy(), tuple(self.maps.layers), accuracies.numpy(), fingerprint_of(self.model)
        ).save(self.file)
