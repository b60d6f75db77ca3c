"""A backend in torch through which gradients flow: any network of the engine can be trained with
it.

It computes several texts of one length at once. What a row sees is given as a mask, and a pass may
follow others whose keys and values it sees, so that a canvas is computed behind its context.
Results have other bits than those of the backends that run a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import (
    Attention,
    Biases,
    Recurrence,
    RecurrenceWeights,
    Weight,
)
from anydecode.kernels.reference import ReferenceBackend
from anydecode.kernels.scan import convolve
from anydecode.models.network import Network

#: The factors of a matrix's update: `[rank, in_features]` and `[out_features, rank]`.
Update = tuple[torch.Tensor, torch.Tensor]


class FrozenNetwork:
    """A network whose weights are not trained, with its matrices in float32, each converted at its
    first use. A copy is the same object."""

    def __init__(self, network: Network) -> None:
        self.network = network
        #: The window of each layer, or None.
        self.windows = [
            None if layer.attention is None else layer.attention.window
            for layer in network.spec.layers
        ]
        self._matrices: dict[Weight, torch.Tensor] = {}

    def matrix(self, weight: Weight) -> torch.Tensor:
        """A matrix, float32 `[out_features, in_features]`."""
        if weight not in self._matrices:
            self._matrices[weight] = torch.from_numpy(np.array(dequantize(weight), np.float32))
        return self._matrices[weight]

    def __deepcopy__(self, memo: Any) -> FrozenNetwork:
        return self


@dataclass(eq=False)
class Stored:
    """What earlier passes over the same texts have stored, by layer: keys and values `[texts, rows,
    heads, head_dim]`, and the inputs of convolutions `[texts, rows, width]`."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class TextRows:
    """The rows of a pass over texts of one length.

    Attributes:
        num_texts: The number of texts.
        positions: Their positions, int64 `[rows]`.
        visible: Which rows (columns: those stored before, then those of this pass) each row sees,
            bool `[1 or texts, rows, stored + rows]`.
        key_positions: The positions of the columns of `visible`, int64 `[stored + rows]`.
        block_starts: Of rows of a canvas behind a context whose rows are stored by position: where
            the block of each row begins, int64 `[rows]`. None: a text from position 0 on.
        stored: What earlier passes have stored, and this one stores.
    """

    num_texts: int
    positions: torch.Tensor
    visible: torch.Tensor
    key_positions: torch.Tensor
    block_starts: torch.Tensor | None = None
    stored: Stored = field(default_factory=Stored)

    def in_window(self, window: int) -> torch.Tensor:
        """Which columns are within the window of each row, bool `[rows, stored + rows]`; rows of a
        canvas have that of the first row of their block."""
        ends = self.positions if self.block_starts is None else self.block_starts
        return self.key_positions > ends[:, None] - window

    def convolved(self, size: int) -> torch.Tensor:
        """The columns that a convolution over `size` positions reads, int64 `[rows, size]`; -1
        before the first position."""
        at = self.positions[:, None] + torch.arange(1 - size, 1)
        if self.block_starts is None:
            return at.clamp(min=-1)
        first, num_stored = self.positions[0], len(self.key_positions) - len(self.positions)
        is_own = at >= self.block_starts[:, None]
        return torch.where(is_own, num_stored + at - first, at).clamp(min=-1)


class GradientBackend(ReferenceBackend):
    """Values are float32 tensors `[texts * rows, width]`.

    Args:
        frozen: The network, for its matrices and windows.
        updates: The low-rank updates of matrices, by the name of their weight.
        rows: The rows of the values.
    """

    name = "gradients"

    def __init__(
        self, frozen: FrozenNetwork, updates: Mapping[str, Update], rows: TextRows
    ) -> None:
        super().__init__()
        self._frozen, self._updates, self._text = frozen, updates, rows

    def _linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: np.ndarray | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        vector = None if bias is None else torch.from_numpy(bias)
        y = functional.linear(x, self._frozen.matrix(weight), vector)
        update = self._updates.get(weight.name)
        if update is not None:
            down, up = update
            y = y + functional.linear(functional.linear(x, down), up)
        return y

    def rope_positions(self, count: int) -> tuple[torch.Tensor, int]:
        positions = self._row_positions()
        return positions, int(positions.max())

    def _row_positions(self) -> torch.Tensor:
        rows = self._text
        return rows.positions.repeat(rows.num_texts)

    def add_positions(self, x: torch.Tensor, table: Weight) -> torch.Tensor:
        rows = self._row_positions().clamp(max=table.out_features - 1)
        return x + torch.from_numpy(np.array(dequantize(table), np.float32))[rows]

    def store(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: int,
        shape: Attention,
        index_key: torch.Tensor | None = None,
    ) -> None:
        if k is None or v is None or shape.top_k is not None:
            raise UnsupportedCombinationError(
                "attention to latents or to selected positions is not trained"
            )
        rows = self._text
        stored = rows.stored
        for known, values, size in (
            (stored.keys, k, shape.head_dim),
            (stored.values, v, shape.value_dim),
        ):
            own = values.view(-1, len(rows.positions), shape.num_kv_heads, size)
            known[layer] = torch.cat([known[layer], own], 1) if layer in known else own

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        others = (sinks, biases, shape.slopes, shape.chunk)
        if any(other is not None for other in others) or shape.is_two_sided:
            raise UnsupportedCombinationError(
                "attention with sinks, biases, chunks or windows on both sides is not trained"
            )
        rows = self._text
        visible, window = rows.visible, self._frozen.windows[layer]
        if window is not None:
            visible = visible & rows.in_window(window)
        query = q.view(-1, len(rows.positions), shape.num_heads, shape.head_dim).transpose(1, 2)
        key, value = (
            part[layer].transpose(1, 2) for part in (rows.stored.keys, rows.stored.values)
        )
        mask = visible.unsqueeze(1)
        if shape.softcap is None:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=shape.scale, enable_gqa=True
            )
        else:
            group = shape.num_heads // shape.num_kv_heads
            key, value = (part.repeat_interleave(group, 1) for part in (key, value))
            scores = self.softcap(query @ key.transpose(-1, -2) * shape.scale, shape.softcap)
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        return mixed.transpose(1, 2).reshape(len(q), -1)

    def convolution(
        self, x: torch.Tensor, layer: int, shape: Recurrence, weights: RecurrenceWeights
    ) -> torch.Tensor:
        rows = self._text
        own, known = x.view(-1, len(rows.positions), x.shape[-1]), rows.stored.inputs
        known[layer] = torch.cat([known[layer], own], 1) if layer in known else own
        texts, columns = known[layer].shape[:2]
        table, first = rows.convolved(shape.window), torch.arange(texts) * columns
        of_texts = torch.where(table < 0, table, table + first[:, None, None]).flatten(0, 1)
        bias = None if weights.conv_bias is None else torch.from_numpy(weights.conv_bias)
        inputs = known[layer].flatten(0, 1)
        return convolve(inputs, of_texts, shape, torch.from_numpy(weights.conv), bias)

    def recurrence(self, *arguments: Any) -> torch.Tensor:
        raise UnsupportedCombinationError("recurrences with a state are not trained")

    def shift(self, *arguments: Any) -> list[torch.Tensor]:
        raise UnsupportedCombinationError("token shifts are not trained")

    def token_rows(self, table: Weight, factor: float, *, has_inputs: bool = False) -> torch.Tensor:
        raise UnsupportedCombinationError("embeddings of tokens in every layer are not trained")

    def shared(self, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()

    def _row_blocks(self) -> torch.Tensor:
        """The number of each row's block, int64 `[texts * rows]`: consecutive rows of a text that
        see the same."""
        rows = self._text
        differs = (rows.visible[:, 1:] != rows.visible[:, :-1]).any(-1)
        is_new = functional.pad(differs, (1, 0), value=True).expand(rows.num_texts, -1)
        return is_new.flatten().cumsum(0) - 1
