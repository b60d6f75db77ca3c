"""A model that scores rows: the inputs, the walk over layer ranges, the taps and the head."""

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
    """Runs a network's layers and head. The seam at which a native backend takes over: it may
    record `Network.layer` once and replay it. A range run in two calls must give the bits of the
    same range run in one."""

    device: torch.device

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """A pass starts; `layers` calls until the next `begin` belong to it."""
        ...

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Embeddings float32 `[m, hidden_size]` of token ids, scaled as the model wants them."""
        ...

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        """States after layer `last - 1` of the rows `active` (indices into the pass), from their
        states x `[m, hidden_size]` before layer `first`. x is not changed."""
        ...

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]`, final norm included. May be called outside a pass."""
        ...


class EagerExecutor:
    """Runs operation by operation on a backend that computes."""

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
        """Run `layer` from now on in place of the network's own; None: that again."""
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

    Rows with token -1 take `rows.inputs`: an embedding where they start at layer 0 (as it is; the
    model's embedding scale is not applied), a hidden state where they start later. `executor` makes
    what replaces the operation-by-operation run.
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
        self._grouped: dict[int, Callable[[Any, Any, int], Any]] = {}
        self.path: Path | None = None  # the checkpoint, where it came from one
        self.dtype: str | None = None  # what its weights were converted to; None: as stored

    def new_cache(self, num_slots: int, format: torch.dtype | str | None = None) -> KeyValues:
        """Zeroed keys and values for `num_slots` positions, in `format` (one of `cache_formats`),
        else in what the executor prefers (`cache_dtype`), else in float32."""
        preferred: torch.dtype | str = getattr(self.executor, "cache_dtype", torch.float32)
        shapes = [layer.attention for layer in self.spec.layers]
        return new_cache(format or preferred, num_slots, shapes, self.executor.device)

    @property
    def cache_formats(self) -> tuple[str, ...]:
        """What the cache may be kept in."""
        return getattr(self.executor, "cache_formats", ("float32", "float16", "bfloat16"))

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One pass. Raises InvalidRequestError for rows that cannot be run."""
        self._check(rows, output_spec)
        whole = getattr(self.executor, "run", None)
        if whole is not None and rows.parallel is None:
            output: Output | None = whole(rows, cache, output_spec)
            if output is not None:  # an executor may decline what it has no short way for
                return output
        with torch.no_grad():
            if rows.parallel is not None:
                return self._run_parallel(rows, cache, output_spec)
            return self._run_stretches(rows, cache, output_spec)

    def _run_stretches(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """A pass as stretches of layers that the same rows run through."""
        x = self._inputs(rows)
        hidden: dict[int, torch.Tensor] = {}
        self.executor.begin(rows, cache)
        stops = set(rows.start.tolist()) | set(rows.stop.tolist()) | set(output_spec.hidden)
        positions = sorted(stops)
        for position, after in zip(positions, [*positions[1:], None], strict=True):
            if position in output_spec.hidden:
                hidden[position] = x[self._index(output_spec.hidden[position])]
            if after is None:
                break
            active = np.flatnonzero((rows.start <= position) & (rows.stop >= after))
            if len(active) == len(rows):
                x = self.executor.layers(x, active, position, after)
            elif len(active):
                at = self._index(active)
                x = x.index_copy(0, at, self.executor.layers(x[at], active, position, after))
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
        """States `[n, hidden_size]` after the final norm, as the head sees them."""
        norm = self.network.weights.final_norm
        return ReferenceBackend().rms_norm(hidden.to(norm.device), norm, self.spec.norm_eps)

    @torch.no_grad()
    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """What rows of these tokens start from: float32 `[n, hidden_size]`, scale included."""
        return self.executor.embed(tokens)

    def add_adapter(self, name: str, path: str | Path) -> int:
        """Load a PEFT LoRA adapter from a folder; its index is what `rows.adapters` names."""
        if name in self.adapter_names:
            raise InvalidRequestError(f"there is already an adapter named {name!r}")
        adapter = load_adapter(Path(path), self.network, self.executor.device)
        self.network.adapters.append(adapter)
        self.adapter_names.append(name)
        return len(self.adapter_names) - 1

    def _run_parallel(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Rows that run layers in parallel, by the size of their groups, and those that do not."""
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
            position: torch.empty(len(index), self.spec.hidden_size, device=self.executor.device)
            for position, index in output_spec.hidden.items()
        }
        for size in np.unique(rows.parallel).tolist():
            chosen = rows.parallel == size
            if size and size not in self._grouped:
                self._grouped[size] = self.network.grouped(size)
            part = _part(rows, np.flatnonzero(chosen))
            number = np.cumsum(chosen, dtype=np.int32) - 1
            mine = chosen[output_spec.logits]
            taps = {position: chosen[index] for position, index in output_spec.hidden.items()}
            wanted = {p: number[index[taps[p]]] for p, index in output_spec.hidden.items()}
            regroup(self._grouped.get(size))
            try:
                found = self.run(part, cache, OutputSpec(number[output_spec.logits[mine]], wanted))
            finally:
                regroup(None)
            logits[torch.from_numpy(mine)] = found.logits
            for position, kept in taps.items():
                hidden[position][torch.from_numpy(kept)] = found.hidden[position]
        return Output(logits, hidden)

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.executor.device)

    def _inputs(self, rows: Rows) -> torch.Tensor:
        if rows.inputs is None:
            return self.executor.embed(rows.tokens)
        given = rows.inputs.to(self.executor.device, torch.float32)
        named = np.flatnonzero(rows.tokens >= 0)
        if not len(named):
            return given
        return given.index_copy(0, self._index(named), self.executor.embed(rows.tokens[named]))

    def _check(self, rows: Rows, output_spec: OutputSpec) -> None:
        """Refuse what would read outside the model or silently mean something else."""
        layers = self.spec.num_layers
        # Most passes have few rows, and then lists are quicker than arrays.
        tokens, start, stop = rows.tokens.tolist(), rows.start.tolist(), rows.stop.tolist()
        if min(tokens, default=0) < 0 and (rows.inputs is None or len(rows.inputs) != len(tokens)):
            raise InvalidRequestError("rows with token -1 need one row of inputs each")
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise InvalidRequestError(
                f"token {max(tokens)} is outside the vocabulary of {self.spec.vocab_size}"
            )
        pairs = zip(start, tokens, strict=True)
        if any(start) and any(first and token >= 0 for first, token in pairs):
            raise InvalidRequestError("a row that starts from a token starts at layer 0")
        if min(start, default=0) < 0 or max(stop, default=0) > layers or any(map(gt, start, stop)):
            raise InvalidRequestError(f"layer ranges lie within 0 and {layers}")
        for position, index in output_spec.hidden.items():
            if (rows.start[index] > position).any() or (rows.stop[index] < position).any():
                raise InvalidRequestError(f"a row was asked for its state after {position} layers")
        if rows.adapters is not None and (rows.adapters >= len(self.adapter_names)).any():
            raise InvalidRequestError(f"there is no adapter {int(rows.adapters.max())}")


def _part(rows: Rows, index: np.ndarray) -> Rows:
    """The rows of `index`, layer after layer."""
    names = "tokens positions slots table prefix tail_start tail_length start stop".split()
    fields = {name: getattr(rows, name)[index] for name in names}
    inputs = None if rows.inputs is None else rows.inputs[torch.from_numpy(index)]
    return replace(rows, **fields, inputs=inputs, parallel=None)
