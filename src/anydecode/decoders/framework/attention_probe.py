"""Attention weights of single rows over cached keys, which the kernels do not return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.arithmetic import RowArithmetic, softmax
from anydecode.kernels.cache import CACHE_FORMATS
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.host import select
from anydecode.kernels.interface import KeyValues
from anydecode.memory.pool import KVPool
from anydecode.models.network import Network


class AttentionProbe:
    """Computes attention weights of single rows in a model whose weights can be read."""

    def __init__(self, model: Any) -> None:
        self._network = _readable_network(model)

    def attention(
        self,
        layer: int,
        state: np.ndarray,
        row_positions: np.ndarray,
        cache: KeyValues,
        slots: np.ndarray,
        key_positions: np.ndarray,
        visible: np.ndarray | None = None,
    ) -> np.ndarray:
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
        spec = self._network.spec.layers[layer]
        shape, cache_layer = spec.attention, spec.cache_layer
        assert shape is not None, "checked by the requirements of decoders"
        backend: Any = RowArithmetic(row_positions)
        queries = self._network.queries(backend, state, layer)
        queries = queries.reshape(len(row_positions), shape.num_heads, shape.head_dim)
        stored = cache.keys[layer if cache_layer is None else cache_layer]
        keys = select(stored, slots).astype(np.float32)
        keys = keys.repeat(shape.num_heads // shape.num_kv_heads, 1)
        scores = queries.swapaxes(0, 1) @ keys.transpose(1, 2, 0) * np.float32(shape.scale)
        if shape.softcap is not None:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        if shape.slopes is not None:
            distance = key_positions[None, :] - row_positions[:, None]
            scores = scores + np.array(shape.slopes, np.float32)[:, None, None] * distance
        stop = row_positions + 1 if visible is None else visible
        is_hidden = key_positions[None, :] >= stop[:, None]
        scores = np.where(is_hidden, np.float32(-np.inf), scores)
        sinks = self._network.weights.layers[layer].sinks
        if sinks is None:
            return softmax(scores)
        columns = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate((scores, columns), -1))[..., :-1]


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
    if network is not None and network.has_wide_states:
        raise UnsupportedCombinationError(
            "attention weights cannot be computed for models with several streams of hidden states"
            " (Gemma 3n) or a memory (SambaY, RemeDi)"
        )
    if network is not None and network.weights.layers[0].matrices[0].data.size:
        readable: Network = network
        return readable
    path: Path | None = getattr(model, "path", None)
    if network is None or path is None:
        raise UnsupportedCombinationError(
            "attention weights cannot be computed for this model: its weights cannot be read, and"
            " it comes from no file; load a transformer from a file, or with backend='torch'"
        )
    from anydecode.models.families import load_network
    from anydecode.models.loading import load_checkpoint

    return load_network(load_checkpoint(path), model.dtype)


def check_float(pool: KVPool) -> None:
    """Raise `UnsupportedCombinationError` if keys and values are not stored as float numbers."""
    if CACHE_FORMATS.get(pool.cache.format) not in DTYPES:
        raise UnsupportedCombinationError(
            "this method needs a key-value cache of float numbers, not a quantized one"
        )
