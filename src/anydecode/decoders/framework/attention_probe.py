"""Attention weights of single rows over cached keys, which the kernels do not return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import KeyValues, Rows
from anydecode.kernels.reference import ReferenceBackend
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.network import Network


class AttentionProbe:
    """Computes attention weights of single rows in a model whose weights can be read."""

    def __init__(self, model: Any) -> None:
        self._network = _readable_network(model)
        self._backend = ReferenceBackend()

    def attention(
        self,
        layer: int,
        state: torch.Tensor,
        row_positions: np.ndarray,
        cache: KeyValues,
        slots: np.ndarray,
        key_positions: np.ndarray,
        visible: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Attention weights, float32 `[heads, rows, keys]`.

        Args:
            layer: The layer whose attention is computed.
            state: The hidden states of the rows before `layer`, `[rows, hidden_size]`.
            row_positions: The positions of the rows.
            cache: The keys and values of all slots.
            slots: The slots of the keys.
            key_positions: The positions of the keys.
            visible: For each row, how many positions it sees (default: those up to its own).
        """
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
        queries: torch.Tensor = self._network.queries(self._backend, state.float(), layer)
        return queries


def attention_probe(model: Any) -> AttentionProbe:
    """The model's `AttentionProbe`, created on the first call."""
    cached = getattr(model, "_attention_probe", None)
    if cached is None:
        cached = model._attention_probe = AttentionProbe(model)
    probe: AttentionProbe = cached
    return probe


def _readable_network(model: Any) -> Network:
    """The model's network; loaded again from its file if the kernels have packed the weights."""
    network = getattr(model, "network", None)
    if network is not None and network.weights.layers[0].query.weight.data.numel():
        readable: Network = network
        return readable
    path: Path | None = getattr(model, "path", None)
    if network is None or path is None:
        raise UnsupportedCombinationError(
            "attention weights cannot be computed for this model: its weights cannot be read, and"
            " it comes from no file; load a transformer from a file, or with backend='torch'"
        )
    from anydecode.models.families import build_model
    from anydecode.models.loading import load_checkpoint

    return build_model(load_checkpoint(path), model.dtype).network


def check_float(context: SequenceCache) -> None:
    """Raise `UnsupportedCombinationError` if keys and values are not stored as float numbers."""
    if any(not keys.is_floating_point() or keys.ndim != 3 for keys in context.pool.cache.keys):
        raise UnsupportedCombinationError(
            "this method needs a key-value cache of float numbers, not a quantized one"
        )
