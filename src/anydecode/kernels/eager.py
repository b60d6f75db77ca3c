"""Executors that run a network's operations one by one, with torch on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.cache import (
    CACHE_FORMATS,
    cache_dtype,
    check_cache_format,
    new_cache,
    stored_heads,
    stored_width,
)
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import (
    Adapter,
    Attention,
    Backend,
    KeyValues,
    Output,
    OutputSpec,
    Recurrence,
    Rows,
    Weight,
)
from anydecode.kernels.recurrent import PassStates, check_rows
from anydecode.kernels.reference import ReferenceBackend
from anydecode.kernels.torch_arrays import as_numpy, as_tensor


class TorchExecutor(ABC):
    """Runs a pass as a series of layer ranges, each with the rows that run through all of it.

    A range of layers that runs in two calls gives the same bits as in one.
    """

    device: torch.device
    cache_formats = tuple(CACHE_FORMATS)
    cache_format = "float32"
    reads_states = False  # whether the hidden states of all rows start as `Rows.inputs`
    extra_width = 0  # numbers of a hidden state beyond those of an embedding

    @property
    def kernels(self) -> str:
        """A name of the code that computes the passes, and of the device if it is no CPU."""
        name = f"torch {torch.__version__}"
        if self.device.type == "cuda":
            name += f" on {torch.cuda.get_device_name(self.device)}"
        return name

    @abstractmethod
    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """Start a pass; calls of `layers` until the next `begin` belong to it."""

    @abstractmethod
    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Embeddings float32 `[m, hidden_size]` of token ids, with the model's scale applied."""

    @abstractmethod
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

    @abstractmethod
    def head(self, x: Any) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]`, final norm included. May be called outside a pass."""

    def new_cache(
        self,
        format: str,
        num_slots: int,
        shapes: Sequence[Attention | None],
        recurrences: Mapping[int, Recurrence] = MappingProxyType({}),
    ) -> KeyValues:
        """A key-value cache of zeros on the device, see `kernels.cache.new_cache`.

        Raises:
            UnsupportedCombinationError: Layers are recurrent and the device is not the CPU.
        """
        if self.device.type == "cpu":
            return new_cache(format, num_slots, shapes, recurrences)
        if recurrences:
            raise UnsupportedCombinationError(
                f"recurrent layers do not run on {self.device.type} yet; use device='cpu'"
            )
        check_cache_format(format)
        dtype = as_tensor(np.empty(0, cache_dtype(format))).dtype

        def empty(shape: Attention | None, is_value: bool) -> torch.Tensor:
            heads, dim = stored_heads(shape, is_value)
            size = (num_slots, heads, stored_width(format, dim))
            return torch.zeros(size, dtype=dtype, device=self.device)

        keys, values = ([empty(s, is_value) for s in shapes] for is_value in (False, True))
        return KeyValues(keys, values, format)

    @torch.no_grad()
    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass. Outputs are numpy arrays on the CPU, else tensors on the device."""
        x = self._inputs(rows)
        if self.extra_width and not self.reads_states:
            x = torch.nn.functional.pad(x, (0, self.extra_width))
        hidden: dict[int, Any] = {}
        self.begin(rows, cache)
        boundaries = set(rows.start.tolist()) | set(rows.stop.tolist()) | set(output_spec.hidden)
        depths = sorted(boundaries)
        for depth, next_depth in zip(depths, [*depths[1:], None], strict=True):
            if depth in output_spec.hidden:
                hidden[depth] = self._output(x[self._index(output_spec.hidden[depth])])
            if next_depth is None:
                break
            active = np.flatnonzero((rows.start <= depth) & (rows.stop >= next_depth))
            if len(active) == len(rows):
                x = self.layers(x, active, depth, next_depth)
            elif len(active):
                index = self._index(active)
                x = x.index_copy(0, index, self.layers(x[index], active, depth, next_depth))
        return Output(self._output(self.head(x[self._index(output_spec.logits)])), hidden)

    def _output(self, x: torch.Tensor) -> Any:
        return as_numpy(x) if self.device.type == "cpu" else x

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _inputs(self, rows: Rows) -> torch.Tensor:
        if rows.inputs is None:
            return self.embed(rows.tokens)
        inputs = as_tensor(rows.inputs, self.device).to(torch.float32)
        token_rows = np.flatnonzero(rows.tokens >= 0)
        if self.reads_states or not len(token_rows):
            return inputs
        return inputs.index_copy(0, self._index(token_rows), self.embed(rows.tokens[token_rows]))


class EagerExecutor(TorchExecutor):
    """Runs a network on the reference backend. Arguments as for `TritonExecutor`."""

    def __init__(
        self,
        embedding: Weight,
        layer: Callable[[Backend, Any, int], Any],
        head: Callable[[Backend, Any], Any],
        *,
        embedding_scale: float = 1.0,
        reads_states: bool = False,
        extra_width: int = 0,
        adapters: Sequence[Adapter] = (),
        backend: ReferenceBackend | None = None,
    ) -> None:
        self._backend = backend or ReferenceBackend()
        self.device = self._backend.device
        self._embedding, self._scale = embedding, embedding_scale
        self._layer = self._plain_layer = layer
        self._head = self._plain_head = head
        self._adapters = adapters
        self.reads_states, self.extra_width = reads_states, extra_width
        self._pass: tuple[Rows, KeyValues] | None = None
        self._states: PassStates | None = None  # of the pass

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        self._pass = rows, cache
        if cache.inputs:
            check_rows(rows, cache.states is not None)
        self._states = None if cache.states is None else cache.states.begin(rows)

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        x = as_tensor(dequantize_rows(self._embedding, tokens), self.device)
        return x if self._scale == 1.0 else x * self._scale

    def regroup(
        self,
        layer: Callable[[Backend, Any, int], Any] | None,
        head: Callable[[Backend, Any], Any] | None = None,
    ) -> None:
        """Run `layer` and `head` in place of the network's own functions; None restores each."""
        self._layer, self._head = layer or self._plain_layer, head or self._plain_head

    @torch.no_grad()
    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        if self._pass is None:
            raise RuntimeError("begin a pass before running its layers")
        rows, cache = self._pass
        scan = None if self._states is None else self._states.scan(active)
        self._backend.bind(rows, active, cache, self._adapters, scan)
        state: Any = as_tensor(x, self.device)
        for index in range(first, last):
            state = self._layer(self._backend, state, index)
        result: torch.Tensor = state
        return result

    @torch.no_grad()
    def head(self, x: Any) -> torch.Tensor:
        self._backend.unbind()
        logits: torch.Tensor = self._head(self._backend, as_tensor(x, self.device).float())
        return logits
