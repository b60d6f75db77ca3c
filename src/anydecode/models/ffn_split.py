"""Splits a network into its attention and its MLPs, the FFNs, which may run in another process
(attention-FFN disaggregation, Step-3, arXiv:2507.19427)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Rows, Weight
from anydecode.models.network import LayerWeights, ModelWeights, Network, mlp_matrices
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.models.transformer import Executor

#: What a layer keeps without its attention.
_FFN_SPEC = (
    "norms", "activation", "num_experts", "routing", "mlp", "has_scale", "gate_cutoff",
    "has_mlp_inner_norm", "has_output_norm", "mlp_norm_gate", "has_residual_gates", "adjugate",
)  # fmt: skip
_FFN_WEIGHTS = (
    "mlp", "mlp_norm", "mlp_norm_bias", "mlp_post_norm", "mlp_post_norm_bias", "scale", "xielu",
    "mlp_inner_norm", "mlp_norm_gate", "mlp_factors", "mlp_residual",
)  # fmt: skip


@dataclass(frozen=True)
class OpenOptions:
    """How a model was opened. The names are those of `open_model`."""

    dtype: str | None = None
    threads: int | None = None
    backend: str | None = None


class ModelSplit(ABC):
    """A method that runs parts of a model's passes in other processes."""

    @abstractmethod
    def executor(
        self, path: Path, options: OpenOptions
    ) -> tuple[Callable[[Network], Executor], Callable[[], None]]:
        """Makes the executor of the model of a folder or file, and ends what it has started."""


def check_split(spec: ModelSpec, name: str) -> None:
    """Raise UnsupportedCombinationError for a model whose layers are not attention and then an
    FFN."""
    states = spec.num_streams > 1 or spec.memory_size or spec.per_layer_size
    for layer in spec.layers:
        is_plain = layer.attention is not None and layer.recurrence is None
        reads_inputs = layer.routes_inputs or layer.experts_read_inputs
        reads_more = layer.is_parallel or reads_inputs or layer.ends_loop
        if not is_plain or layer.mlp == "none" or reads_more or states:
            raise UnsupportedCombinationError(
                f"{name} has layers that are not attention with an FFN behind it, which cannot be"
                " split"
            )
    routings = [layer.routing for layer in spec.layers if layer.routing is not None]
    if any(routing.block_experts is not None for routing in routings):
        raise UnsupportedCombinationError(
            f"{name} chooses experts for the rows of a block together, and cannot be split"
        )
    if spec.states is not None or spec.time is not None or spec.has_canvas:
        raise UnsupportedCombinationError(
            f"{name} is a drafter or depends on the time of the diffusion, and cannot be split"
        )


def attention_part(network: Network) -> Network:
    """The network without its FFNs; it shares the other weights and the adapters."""
    plain = LayerSpec(None, None)
    without: dict[str, Any] = {name: getattr(plain, name) for name in _FFN_SPEC}
    for name in ("norms", "has_residual_gates"):  # of both
        del without[name]
    without["mlp"] = "none"
    layers = tuple(replace(layer, **without) for layer in network.spec.layers)
    weights = [replace(layer, **dict.fromkeys(_FFN_WEIGHTS)) for layer in network.weights.layers]
    return Network(
        replace(network.spec, layers=layers),
        replace(network.weights, layers=weights),
        network.adapters,
    )


def ffn_part(network: Network) -> Network:
    """The FFNs alone, with norms and residual connections: layers from the hidden states after the
    attention to those after the layer. It has a vocabulary of one token, without meaning."""
    spec = network.spec
    layers = tuple(
        LayerSpec(None, None, **{name: getattr(layer, name) for name in _FFN_SPEC})
        for layer in spec.layers
    )
    own = ModelSpec(
        spec.architecture,
        vocab_size=1,
        hidden_size=spec.hidden_size,
        max_positions=spec.max_positions,
        norm_eps=spec.norm_eps,
        layers=layers,
        residual_scale=spec.residual_scale,
        norm=spec.norm,
        post_norm_eps=spec.post_norm_eps,
        has_final_norm=False,
    )
    token = plain_weight(np.zeros((1, spec.hidden_size), np.float32))
    weights = [
        LayerWeights(**{name: getattr(layer, name) for name in _FFN_WEIGHTS})
        for layer in network.weights.layers
    ]
    return Network(own, ModelWeights(token, weights, None, token))


def ffn_digest(network: Network) -> str:
    """A digest of everything that determines what the FFNs compute, before their matrices are
    packed or freed."""
    part, digest = ffn_part(network), hashlib.sha256()
    spec, layers = part.spec, part.weights.layers
    norms = spec.norm, spec.norm_eps, spec.post_norm_eps
    _update(digest, [spec.hidden_size, norms, spec.residual_scale, spec.layers, layers])
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    """Add a value to a digest, with all parts that it consists of. The names of matrices, which
    differ between file formats, are left out."""
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    elif is_dataclass(value):
        names = [one.name for one in fields(value)]
        if isinstance(value, Weight):
            names.remove("name")
        digest.update(f"{type(value).__name__} {len(names)} ".encode())
        for name in names:
            _update(digest, getattr(value, name))
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} ".encode())
        for one in value:
            _update(digest, one)
    else:
        assert value is None or isinstance(value, bool | int | float | str), type(value)
        digest.update(f"{value!r} ".encode())


def free_ffns(network: Network) -> None:
    """Free the matrices of the FFNs."""
    for layer in network.weights.layers:
        for weight in () if layer.mlp is None else mlp_matrices(layer.mlp):
            weight.free()


def state_rows(count: int) -> Rows:
    """Rows that have nothing but hidden states: no slots, and nothing to attend to."""
    zeros, none = np.zeros(count, np.int32), np.full(count, -1, np.int32)
    empty = np.empty(0, np.int32)
    return Rows(none, zeros, none, [empty], zeros, zeros, empty, zeros, zeros, zeros, zeros)


def micro_batches(rows: Rows, active: np.ndarray, count: int, num_slots: int) -> list[np.ndarray]:
    """Divide rows of a pass into up to `count` micro-batches of about equal size, in order.

    A layer's attention runs one micro-batch after the other, so no row may read what a row of a
    later one stores: rows of bidirectional attention stay together.

    Args:
        rows: The rows of the pass.
        active: Indices of those to divide, ascending, int `[m]`.
        count: The largest number of micro-batches.
        num_slots: The number of slots of the cache.
    """
    ends = _last_reads(rows, num_slots)[active]
    # A cut before active row i is allowed where the rows before it read nothing from it on.
    allowed = [i for i in range(1, len(active)) if ends[:i].max() < active[i]]
    if not allowed:
        return [active]
    places = np.array(allowed)
    targets = [len(active) * part / count for part in range(1, count)]
    cuts = sorted({int(places[np.abs(places - target).argmin()]) for target in targets})
    return [part for part in np.split(active, cuts) if len(part)]


def _last_reads(rows: Rows, num_slots: int) -> np.ndarray:
    """The last row of the pass whose keys each row reads, int `[rows]`; -1: none."""
    owner = np.full(num_slots + 1, -1)  # the last entry is that of positions without a slot
    stored = np.flatnonzero(rows.slots >= 0)
    owner[rows.slots[stored]] = stored
    owner[-1] = -1
    reach = []
    for table in rows.tables:
        owners = owner[table]
        owners = owners.max(0) if owners.ndim > 1 else owners
        reach.append(np.concatenate([[-1], np.maximum.accumulate(owners)]))
    found = np.array(
        [reach[table][prefix] for table, prefix in zip(rows.table, rows.prefix, strict=True)]
    )
    tails = owner[rows.tails]
    for row in np.flatnonzero(rows.tail_length):
        start = rows.tail_start[row]
        found[row] = max(found[row], tails[start : start + rows.tail_length[row]].max())
    return found
