"""`Transformer`, which runs rows through ranges of layers and returns logits and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import gt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cache import CACHE_FORMATS, new_cache
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.kernels.reference import ReferenceBackend
from anydecode.models.lora import load_adapter
from anydecode.models.network import ModelWeights, Network
from anydecode.models.spec import ModelSpec


class Executor(Protocol):
    """Runs a network's layers and head.

    Native backends implement this interface. They may record `Network.layer` once and replay it. A
    range of layers run in two calls must give the same bits as the same range run in one call.
    """

    device: torch.device

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """Start a pass; calls of `layers` until the next `begin` belong to it."""
        ...

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Embeddings float32 `[m, hidden_size]` of token ids, with the model's scale applied."""
        ...

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last - 1` on some rows of the pass.

        Args:
            x: Their hidden states before layer `first`, `[m, hidden_size]`; not changed.
            active: Their indices in the pass, `[m]`.
            first: The first layer.
            last: The layer to stop before.

        Returns:
            Their hidden states after the layers, `[m, hidden_size]`.
        """
        ...

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]`, final norm included. May be called outside a pass."""
        ...


class EagerExecutor:
    """Runs the operations one by one on an eager backend."""

    cache_formats = tuple(CACHE_FORMATS)

    def __init__(self, network: Network, backend: ReferenceBackend) -> None:
        self.device = backend.device
        self._network = network
        self._backend = backend
        self._layer: Callable[[Any, Any, int], Any] = network.layer
        self._pass: tuple[Rows, KeyValues] | None = None

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        self._pass = rows, cache

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        x = dequantize_rows(self._network.weights.embedding, tokens)
        scale = self._network.spec.embedding_scale
        return x if scale == 1.0 else x * scale

    def regroup(self, layer: Callable[[Any, Any, int], Any] | None) -> None:
        """Run `layer` in place of the network's own layer function; None restores it."""
        self._layer = layer or self._network.layer

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        if self._pass is None:
            raise RuntimeError("begin a pass before running its layers")
        rows, cache = self._pass
        self._backend.bind(rows, active, cache, self._network.adapters)
        for index in range(first, last):
            x = self._layer(self._backend, x, index)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        self._backend.unbind()
        logits: torch.Tensor = self._network.head(self._backend, x)
        return logits


class Transformer:
    """A decoder-only transformer as a `Model`.

    Rows with token -1 take their input from `rows.inputs`: an embedding if they start at layer 0
    (the model's embedding scale is not applied to it), a hidden state if they start at a later
    layer.

    Args:
        spec: The architecture.
        weights: The weights, which must match the spec.
        backend: The eager backend; used without `executor`.
        name: A name for messages and reports.
        executor: Makes the executor of the network; None means `EagerExecutor`.

    Raises:
        CheckpointError: The weights do not match the spec.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        backend: ReferenceBackend | None = None,
        *,
        name: str = "model",
        executor: Callable[[Network], Executor] | None = None,
    ) -> None:
        self.spec = spec
        self.name = name
        self.network = Network(spec, weights)
        self.executor: Executor = (
            executor(self.network)
            if executor
            else EagerExecutor(self.network, backend or ReferenceBackend())
        )
        self.adapter_names: list[str] = []
        self._parallel_layers: dict[int, Callable[[Any, Any, int], Any]] = {}
        self.path: Path | None = None  # of the checkpoint, if there is one
        self.dtype: str | None = None  # the format its weights were converted to; None: as stored

    def new_cache(self, num_slots: int, format: torch.dtype | str | None = None) -> KeyValues:
        """Zeroed keys and values for `num_slots` positions, in `format` (one of `cache_formats`).
        The default is the executor's `cache_dtype`, else float32."""
        preferred: torch.dtype | str = getattr(self.executor, "cache_dtype", torch.float32)
        shapes = [layer.attention for layer in self.spec.layers]
        return new_cache(format or preferred, num_slots, shapes, self.executor.device)

    @property
    def cache_formats(self) -> tuple[str, ...]:
        """The supported formats of the key-value cache."""
        return getattr(self.executor, "cache_formats", ("float32", "float16", "bfloat16"))

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One forward pass.

        Raises:
            InvalidRequestError: Rows are invalid: a missing input, an unknown token or adapter, or
                a wrong range of layers.
            UnsupportedCombinationError: Layers cannot run in parallel with this executor or with
                adapters.
        """
        self._check(rows, output_spec)
        run_pass = getattr(self.executor, "run", None)
        if run_pass is not None and rows.parallel is None:
            output: Output | None = run_pass(rows, cache, output_spec)
            if output is not None:  # None: the executor has no fused implementation of this pass
                return output
        with torch.no_grad():
            if rows.parallel is not None:
                return self._run_parallel(rows, cache, output_spec)
            return self._run_layer_ranges(rows, cache, output_spec)

    def _run_layer_ranges(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass as a series of layer ranges, each with the rows that run through all of it."""
        x = self._inputs(rows)
        hidden: dict[int, torch.Tensor] = {}
        self.executor.begin(rows, cache)
        boundaries = set(rows.start.tolist()) | set(rows.stop.tolist()) | set(output_spec.hidden)
        depths = sorted(boundaries)
        for depth, next_depth in zip(depths, [*depths[1:], None], strict=True):
            if depth in output_spec.hidden:
                hidden[depth] = x[self._index(output_spec.hidden[depth])]
            if next_depth is None:
                break
            active = np.flatnonzero((rows.start <= depth) & (rows.stop >= next_depth))
            if len(active) == len(rows):
                x = self.executor.layers(x, active, depth, next_depth)
            elif len(active):
                index = self._index(active)
                x = x.index_copy(
                    0, index, self.executor.layers(x[index], active, depth, next_depth)
                )
        if len(output_spec.logits):
            logits = self.executor.head(x[self._index(output_spec.logits)])
        else:
            logits = x.new_empty(0, self.spec.vocab_size)
        return Output(logits, hidden)

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, vocab_size]` of states `[n, hidden_size]`, final norm included."""
        return self.executor.head(hidden.to(self.executor.device, torch.float32))

    @torch.no_grad()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[n, hidden_size]` after the final norm, the input of the head's matrix."""
        norm = self.network.weights.final_norm
        return ReferenceBackend().rms_norm(hidden.to(norm.device), norm, self.spec.norm_eps)

    @torch.no_grad()
    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Input embeddings of tokens, float32 `[n, hidden_size]`, with the model's scale
        applied."""
        return self.executor.embed(tokens)

    def add_adapter(self, name: str, path: str | Path) -> int:
        """Load a PEFT LoRA adapter from a folder.

        Args:
            name: A name that no other adapter has.
            path: The folder.

        Returns:
            Its index, for `rows.adapters`.

        Raises:
            InvalidRequestError: There is already an adapter of this name.
            CheckpointError: The files are missing or corrupt, or do not fit the model.
        """
        if name in self.adapter_names:
            raise InvalidRequestError(f"there is already an adapter named {name!r}")
        adapter = load_adapter(Path(path), self.network, self.executor.device)
        self.network.adapters.append(adapter)
        self.adapter_names.append(name)
        return len(self.adapter_names) - 1

    def _run_parallel(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass in which some rows run layers in parallel: one part per group size, and one
        for the rows that do not."""
        regroup = getattr(self.executor, "regroup", None)
        if regroup is None or rows.adapters is not None:
            raise UnsupportedCombinationError(
                "running layers in parallel (easyspec) works on CPUs and without adapters"
            )
        assert rows.parallel is not None
        logits = torch.empty(
            len(output_spec.logits), self.spec.vocab_size, device=self.executor.device
        )
        hidden = {
            depth: torch.empty(len(index), self.spec.hidden_size, device=self.executor.device)
            for depth, index in output_spec.hidden.items()
        }
        for size in np.unique(rows.parallel).tolist():
            is_selected = rows.parallel == size
            if size and size not in self._parallel_layers:
                self._parallel_layers[size] = self.network.parallel_layers(size)
            part = _part(rows, np.flatnonzero(is_selected))
            part_row = np.cumsum(is_selected, dtype=np.int32) - 1
            selected_logits = is_selected[output_spec.logits]
            selected_hidden = {
                depth: is_selected[index] for depth, index in output_spec.hidden.items()
            }
            hidden_rows = {
                depth: part_row[index[selected_hidden[depth]]]
                for depth, index in output_spec.hidden.items()
            }
            regroup(self._parallel_layers.get(size))
            try:
                output = self.run(
                    part,
                    cache,
                    OutputSpec(part_row[output_spec.logits[selected_logits]], hidden_rows),
                )
            finally:
                regroup(None)
            logits[torch.from_numpy(selected_logits)] = output.logits
            for depth, selected in selected_hidden.items():
                hidden[depth][torch.from_numpy(selected)] = output.hidden[depth]
        return Output(logits, hidden)

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.executor.device)

    def _inputs(self, rows: Rows) -> torch.Tensor:
        if rows.inputs is None:
            return self.executor.embed(rows.tokens)
        inputs = rows.inputs.to(self.executor.device, torch.float32)
        token_rows = np.flatnonzero(rows.tokens >= 0)
        if not len(token_rows):
            return inputs
        return inputs.index_copy(
            0, self._index(token_rows), self.executor.embed(rows.tokens[token_rows])
        )

    def _check(self, rows: Rows, output_spec: OutputSpec) -> None:
        """Reject rows that would read outside the model or give wrong results."""
        num_layers = self.spec.num_layers
        # Most passes have few rows, for which lists are faster than arrays.
        tokens, start, stop = rows.tokens.tolist(), rows.start.tolist(), rows.stop.tolist()
        if min(tokens, default=0) < 0 and (rows.inputs is None or len(rows.inputs) != len(tokens)):
            raise InvalidRequestError("rows with token -1 need one row of inputs each")
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise InvalidRequestError(
                f"token {max(tokens)} is outside the vocabulary of {self.spec.vocab_size}"
            )
        pairs = zip(start, tokens, strict=True)
        if any(start) and any(first and token >= 0 for first, token in pairs):
            raise InvalidRequestError("a row whose input is a token must start at layer 0")
        if (
            min(start, default=0) < 0
            or max(stop, default=0) > num_layers
            or any(map(gt, start, stop))
        ):
            raise InvalidRequestError(f"layer ranges must lie within 0 and {num_layers}")
        for depth, index in output_spec.hidden.items():
            if (rows.start[index] > depth).any() or (rows.stop[index] < depth).any():
                raise InvalidRequestError(
                    f"the hidden state after {depth} layers is requested of a row that does not run"
                    " through them"
                )
        if rows.adapters is not None and (rows.adapters >= len(self.adapter_names)).any():
            raise InvalidRequestError(f"there is no adapter {int(rows.adapters.max())}")


def _part(rows: Rows, index: np.ndarray) -> Rows:
    """The rows of `index`, without parallel layers."""
    names = "tokens positions slots table prefix tail_start tail_length start stop".split()
    fields = {name: getattr(rows, name)[index] for name in names}
    inputs = None if rows.inputs is None else rows.inputs[torch.from_numpy(index)]
    return replace(rows, **fields, inputs=inputs, parallel=None)
