"""How much some rows look at what is in memory: attention that the kernels do not give away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import KeyValues, Rows
from anydecode.kernels.reference import ReferenceBackend
from anydecode.models.network import Network


class AttentionProbe:
    """Attention of single rows in a model whose weights can be read."""

    def __init__(self, model: Any) -> None:
        self._network = _readable(model)
        self._backend = ReferenceBackend()

    def share(
        self,
        layer: int,
        state: torch.Tensor,
        row_positions: np.ndarray,
        cache: KeyValues,
        slots: np.ndarray,
        key_positions: np.ndarray,
        visible: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Attention float32 `[heads, rows, keys]` of the rows at `positions`, whose states before
        `layer` are `state`, over the keys in `slots`, which stand at `positions`. Each row sees as
        many positions as `visible` says (default: those up to its own)."""
        shape = self._network.spec.layers[layer].attention
        queries = self._queries(layer, state, row_positions).view(
            len(row_positions), shape.num_heads, -1
        )
        keys = cache.keys[layer][torch.from_numpy(slots.astype(np.int64))].float()
        keys = keys.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
        scores = torch.einsum("rhd,khd->hrk", queries, keys) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        stop = row_positions + 1 if visible is None else visible
        hidden = torch.from_numpy(key_positions[None, :] >= stop[:, None])
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    @torch.no_grad()
    def _queries(self, layer: int, state: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        count = len(positions)
        zeros = np.zeros(count, np.int32)
        rows = Rows(
            zeros, positions.astype(np.int32), zeros, [], zeros, zeros, zeros, zeros, zeros, zeros,
            zeros,
        )  # fmt: skip
        self._backend.bind(rows, np.arange(count), KeyValues([], []))
        found: torch.Tensor = self._network.queries(self._backend, state.float(), layer)
        return found


def attention_probe(model: Any) -> AttentionProbe:
    """The model's `AttentionProbe`, made once."""
    held = getattr(model, "_looks", None)
    if held is None:
        held = model._looks = AttentionProbe(model)
    found: AttentionProbe = held
    return found


def _readable(model: Any) -> Network:
    """The model's network; read from its file again where the kernels have packed the weights."""
    network = getattr(model, "network", None)
    if network is not None and network.weights.layers[0].query.weight.data.numel():
        found: Network = network
        return found
    path: Path | None = getattr(model, "path", None)
    if network is None or path is None:
        raise UnsupportedCombinationError(
            "attention is not to be had from this model: it comes from no file; a model opened with"
            " backend='torch' will do"
        )
    from anydecode.models.families import build_model
    from anydecode.models.loading import load_checkpoint

    return build_model(load_checkpoint(path), model.dtype).network
