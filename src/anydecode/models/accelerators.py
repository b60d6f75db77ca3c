"""Accelerators of a model's first layers: low-rank adapters with which a second residual stream
runs ahead of the model's own (M2R2, arXiv:2502.02040)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.arithmetic import RowArithmetic, softmax
from anydecode.models.exit_files import ByExit, check_model, read_exits, write_exits
from anydecode.models.network import Network
from anydecode.models.spec import ModelSpec

#: The file of a model's folder that has its accelerators.
FILE_NAME = "accelerators.safetensors"
PARTS = ("query_down", "query_up", "output_down", "output_up", "mlp_down", "mlp_up")

#: Keys and values of a layer, float32 `[positions, kv_heads, head_dim]` each.
KeysValues = Callable[[int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Accelerators:
    """The adapters of consecutive layers of one model, by layer, counted from 0.

    The accelerated state p starts as the model's own state before the first of these layers. Each
    of them adds up(down(x)) of its attention over the model's own keys and values, then
    up(silu(down(x))) of an MLP. Both read p after an RMS norm without weights. The queries of the
    attention are up(down(x)) too, with the layer's rotary position embedding.

    Attributes:
        query_down: float32 `[rank, hidden_size]`.
        query_up: float32 `[heads * head_dim, rank]`.
        output_down: float32 `[rank, heads * head_dim]`.
        output_up: float32 `[hidden_size, rank]`.
        mlp_down: float32 `[rank, hidden_size]`.
        mlp_up: float32 `[hidden_size, rank]`.
        fingerprint: That of the model (`model_fingerprint`).
    """

    query_down: ByExit
    query_up: ByExit
    output_down: ByExit
    output_up: ByExit
    mlp_down: ByExit
    mlp_up: ByExit
    fingerprint: str

    @property
    def layers(self) -> list[int]:
        """The layers with an adapter, ascending."""
        return sorted(self.query_down)

    def __call__(
        self, spec: ModelSpec, state: np.ndarray, position: int, keys_values: KeysValues
    ) -> np.ndarray:
        """The accelerated state after the last of the layers, float32 `[hidden_size]`.

        Args:
            spec: The model.
            state: Its state before the first of the layers, float32 `[hidden_size]`.
            position: The position of the state.
            keys_values: What each layer has stored of the positions up to this one.
        """
        rows, p = RowArithmetic(np.array([position])), state[None]
        for layer in self.layers:
            shape, rope = spec.layers[layer].attention, spec.layers[layer].rope
            assert shape is not None, "checked by `check`"
            x = rows.rms_norm(p, None, spec.norm_eps)
            query = x @ self.query_down[layer].T @ self.query_up[layer].T
            if rope is not None:
                query = rows.rope(query, shape.num_heads, rope)
            # Each head of keys serves as many heads of queries: [kv_heads, shared, head_dim].
            query = query.reshape(shape.num_kv_heads, -1, shape.head_dim)
            keys, values = keys_values(layer)
            weights = softmax(query @ keys.transpose(1, 2, 0) * np.float32(shape.scale))
            mixed = (weights @ values.swapaxes(0, 1)).reshape(1, -1)
            p = p + mixed @ self.output_down[layer].T @ self.output_up[layer].T
            inner = rows.rms_norm(p, None, spec.norm_eps) @ self.mlp_down[layer].T
            p = p + (inner / (1 + np.exp(-inner))) @ self.mlp_up[layer].T
        accelerated: np.ndarray = p[0]
        return accelerated

    def check(self, network: Network) -> None:
        """Raise an error unless the accelerators are those of `network`.

        Raises:
            InvalidRequestError: They are those of another model.
            UnsupportedCombinationError: A layer has no plain attention with keys of its own.
        """
        widths = {
            matrix.shape[1] for matrix in (*self.query_down.values(), *self.mlp_down.values())
        }
        check_model(
            self.fingerprint,
            network,
            "accelerators",
            "depth --recipe m2r2",
            widths=widths,
            layers=self.layers,
        )
        for layer in self.layers:
            spec = network.spec.layers[layer]
            shape, size = spec.attention, self.query_up[layer].shape[0]
            is_plain = spec.latent is None and spec.cache_layer is None
            is_plain = is_plain and (shape is None or shape.value_size is None)
            if shape is None or not is_plain or shape.num_heads * shape.head_dim != size:
                raise UnsupportedCombinationError(
                    "m2r2 needs layers with attention over keys and values of their own, of the"
                    f" sizes of its accelerators: layer {layer} has none"
                )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        write_exits(path, {part: getattr(self, part) for part in PARTS}, self.fingerprint)

    @staticmethod
    def load(path: Path) -> Accelerators:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        found, metadata = read_exits(path, PARTS, "accelerators")
        parts = dict(zip(PARTS, found, strict=True))
        accelerators = Accelerators(**parts, fingerprint=metadata["fingerprint"])
        layers = accelerators.layers
        if layers != list(range(max(1, layers[0]), layers[-1] + 1)) or not all(
            accelerators._fits(layer) for layer in layers
        ):
            raise CheckpointError(f"accelerators {path}: the tensors do not fit together")
        return accelerators

    def _fits(self, layer: int) -> bool:
        """Whether the matrices of a layer have one rank and the sizes of the first layer's."""
        parts = [getattr(self, part)[layer] for part in PARTS]
        if any(one.ndim != 2 for one in parts):
            return False
        rank, hidden = parts[0].shape
        queries, first = parts[1].shape[0], self.query_down[self.layers[0]]
        down, up = (rank, hidden), (hidden, rank)
        shapes = [down, (queries, rank), (rank, queries), up, down, up]
        return (
            [one.shape for one in parts] == shapes and first.ndim == 2 and first.shape[1] == hidden
        )
