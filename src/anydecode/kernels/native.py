"""Runs a network through the compiled kernels: one call per pass over a recorded program."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cache import CACHE_FORMATS
from anydecode.kernels.interface import (
    Adapter,
    Backend,
    KeyValues,
    Output,
    OutputSpec,
    Rows,
    SampleSpec,
    Weight,
)
from anydecode.kernels.library import FORMAT_CODES, Library, Lora, Pass, Tap, load_library
from anydecode.kernels.library import Choice as NativeChoice
from anydecode.kernels.packing import Packer
from anydecode.kernels.program import Program, record

_CACHE_CODES = {name: FORMAT_CODES[same] for name, same in CACHE_FORMATS.items()}
MAX_THREADS = 256  # of the pool in threads.c
_INT_FIELDS = ("tokens", "positions", "slots", "table", "prefix", "tail_start", "tail_length")
_PROBLEMS = {
    1: "a token lies outside the vocabulary, or has no input",
    2: "a slot lies outside the cache",
    3: "a row names a table that is missing or too short",
    4: "a row names an adapter that is not loaded",
    5: "there is not enough memory for this pass",
}


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def thread_count(threads: int | None) -> int:
    """Threads to use: those asked for, or one for each core. Raises InvalidRequestError."""
    if threads is None:
        return min(physical_cores(), MAX_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise InvalidRequestError(
            f"threads is {threads!r}; allowed is an integer from 1 to {MAX_THREADS}, or None for"
            " one per core"
        )
    return threads


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class _Buffers:
    """The memory of a pass, grown to the largest one seen."""

    def __init__(self, scratch_floats: int) -> None:
        self.rows = self.logits = self.floats = 0
        self.ints = np.empty((0, 0), np.int32)
        self.scratch = torch.empty(max(1, scratch_floats), dtype=torch.float32)

    def grow_rows(self, count: int, hidden_size: int) -> None:
        self.rows = max(count, 2 * self.rows)
        self.ints = np.zeros((len(_INT_FIELDS) + 2, self.rows), np.int32)
        self.stream = torch.empty(self.rows, hidden_size, dtype=torch.float32)

    def grow_floats(self, count: int) -> None:
        self.floats = count
        self.workspace = torch.empty(count + 16, dtype=torch.float32)

    def grow_logits(self, count: int, vocab_size: int) -> None:
        self.logits = count
        self.out = torch.empty(count, vocab_size, dtype=torch.float32)
        self.views: dict[int, torch.Tensor] = {}  # of its first rows, by how many


class NativeExecutor:
    """Runs passes of one network. Implements the transformer's `Executor`, and `run`: a whole pass
    in one call. Outputs are views that the next pass overwrites. Not for concurrent use.

    `layer(backend, x, index)` and `head(backend, x)` are the network, written against `Backend`.
    """

    device = torch.device("cpu")
    cache_formats = tuple(CACHE_FORMATS)

    def __init__(
        self,
        embedding: Weight,
        vocab_size: int,
        num_layers: int,
        layer: Callable[[Backend, Any, int], Any],
        head: Callable[[Backend, Any], Any],
        *,
        embedding_scale: float = 1.0,
        adapters: Sequence[Adapter] = (),
        threads: int | None = None,
        library: Library | None = None,
    ) -> None:
        found = library or load_library()
        if found is None:
            raise UnsupportedCombinationError("the native kernels are not available here")
        self._library = found
        self.threads = thread_count(threads)
        self.packer = Packer(found, self.threads)
        self._network = (embedding, embedding_scale, num_layers, layer, head)
        self._adapters, self._loaded = adapters, 0
        self._hidden_size, self._vocab_size = embedding.in_features, vocab_size
        self._num_layers = num_layers
        self.program = record(self.packer, *self._network, ())
        self._adapted: Program | None = None
        self._others: dict[Callable[[Backend, Any, int], Any], Program] = {}
        self._plain = self.program
        # Products of quantised weights round activations to eight bits anyway.
        self.cache_dtype = torch.float16 if self.packer.quantised else torch.float32
        self._cache: KeyValues | None = None
        self._cache_key: tuple[Any, ...] = ()
        self._rows: Rows | None = None
        self._pass = Pass(
            num_layers=num_layers, vocab_size=vocab_size, hidden_size=self._hidden_size
        )
        self._pass_address = ctypes.addressof(self._pass)
        self._choices: Any = ()
        self._said = np.empty(0, np.int32)
        self._ends: frozenset[int] | None = None
        self._table_arrays: Any = ((), (), ())
        floats = self._scratch_floats()
        self._buffers = _Buffers(floats * self.threads)
        self._pass.attention_scratch_floats = floats
        self._pass.attention_scratch = self._buffers.scratch.data_ptr()
        self._use(self.program)

    def _scratch_floats(self) -> int:
        sizes = {(s.head_dim, s.num_heads // s.num_kv_heads) for s in self.program.shapes}
        return max((int(self._library.attention_floats(*size)) for size in sizes), default=0)

    def _use(self, program: Program) -> None:
        self._current = program
        p = self._pass
        p.ops, p.num_ops = ctypes.addressof(program.ops), program.num_ops
        p.num_prologue, p.head = program.num_prologue, program.head
        p.head_offset = program.body_floats

    # --- one call

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One pass over all layers, from tokens to what is wanted."""
        count = len(rows)
        start, stop = int(rows.start[0]) if count else 0, int(rows.stop[0]) if count else 0
        if not count or (
            count > 1 and not ((rows.start == start).all() and (rows.stop == stop).all())
        ):
            return self._run_parts(rows, cache, output_spec)
        self._bind(rows, cache, None)
        self._pass.embed = 1
        self._set_inputs(rows, count)
        taps, hidden = self._taps(output_spec, start, stop)
        choices = self._choose(output_spec.samples)
        said = output_spec.num_steps if rows.tables[-1].ndim == 1 else 1
        if said > 1:
            self._bind_said(said, output_spec.end_tokens)
        self._call(start, stop, output_spec.logits, taps, len(output_spec.samples), said)
        picks = [choices[i].pick for i in range(len(output_spec.samples))]
        if said > 1:
            picks = self._said[:said].tolist()
            picks = picks[: picks.index(-1)] if -1 in picks else picks
        return Output(self._logits(len(output_spec.logits)), hidden, picks)

    def _bind_said(self, said: int, ends: frozenset[int]) -> None:
        p = self._pass
        if ends is not self._ends:
            self._ends, self._end_array = ends, np.array(sorted(ends), np.int32)
            p.ends, p.num_ends = _address(self._end_array), len(ends)
        if said > len(self._said):
            self._said = np.empty(2 * said, np.int32)
            p.said = _address(self._said)

    def _run_parts(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Rows with different layer ranges: one call per stretch of layers."""
        x = self._start(rows)
        hidden: dict[int, torch.Tensor] = {}
        self.begin(rows, cache)
        places = sorted({*rows.start.tolist(), *rows.stop.tolist(), *output_spec.hidden})
        for place, after in zip(places, [*places[1:], None], strict=True):
            if place in output_spec.hidden:
                hidden[place] = x[torch.from_numpy(output_spec.hidden[place].astype(np.int64))]
            active = np.flatnonzero((rows.start <= place) & (rows.stop >= (after or place)))
            if after is not None and len(active):
                at = torch.from_numpy(active)
                x[at] = self.layers(x[at], active, place, after)
        wanted = torch.from_numpy(output_spec.logits.astype(np.int64))
        return Output(self.head(x[wanted]), hidden)

    def _start(self, rows: Rows) -> torch.Tensor:
        x = torch.zeros(len(rows), self._hidden_size)
        named = np.flatnonzero(rows.tokens >= 0)
        if rows.inputs is not None:
            x.copy_(rows.inputs)
        elif len(named) < len(rows):
            raise InvalidRequestError(_PROBLEMS[1])
        if len(named):
            x[torch.from_numpy(named)] = self.embed(rows.tokens[named])
        return x

    # --- the transformer's seam

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """A pass starts; the `layers` calls that follow belong to it."""
        self._rows, self._cache_in_use = rows, cache

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Embeddings float32 `[m, hidden_size]`, scaled as the model wants them."""
        count = len(tokens)
        self._ready(count, 0)
        self._buffers.ints[0, :count] = tokens
        self._pass.embed, self._pass.inputs = 1, None
        self._pass.num_rows, self._pass.num_taps = count, 0
        self._pass.adapters = None
        self._call(0, 0, None)
        return self._buffers.stream[:count].clone()

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        """States after layer `last - 1` of the rows `active`, from their states before `first`."""
        if self._rows is None:
            raise RuntimeError("begin a pass before running its layers")
        self._bind(self._rows, self._cache_in_use, active)
        self._pass.embed, self._pass.num_taps = 0, 0
        self._buffers.stream[: len(active)].copy_(x)
        self._call(first, last, None)
        return self._buffers.stream[: len(active)].clone()

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]` of states, final norm included; the last pass's stay."""
        count = len(x)
        self._ready(count, count)
        self._pass.embed, self._pass.num_taps, self._pass.num_rows = 0, 0, count
        self._pass.adapters = None
        self._buffers.stream[:count].copy_(x)
        logits = torch.empty(count, self._vocab_size)
        self._pass.logits = logits.data_ptr()
        try:
            self._call(0, 0, np.arange(count, dtype=np.int32))
        finally:
            self._pass.logits = self._buffers.out.data_ptr()
        return logits

    # --- filling in the pass

    def _ready(self, rows: int, logits: int) -> None:
        """Room for this many rows and logits."""
        b, p = self._buffers, self._pass
        if rows > b.rows:
            b.grow_rows(rows, self._hidden_size)
            for index, name in enumerate(_INT_FIELDS):
                setattr(p, name, _address(b.ints[index]))
            p.stream = b.stream.data_ptr()
            p.logit_rows = _address(b.ints[len(_INT_FIELDS) + 1])
        if logits > b.logits:
            b.grow_logits(logits, self._vocab_size)
            p.logits = b.out.data_ptr()
        floats = rows * self._current.body_floats + logits * self._current.head_floats
        if floats > b.floats:
            b.grow_floats(floats)
            p.workspace = -(-b.workspace.data_ptr() // 64) * 64

    def _bind(self, rows: Rows, cache: KeyValues, active: np.ndarray | None) -> None:
        """Put the rows (or those of index `active`), their tables and the cache into the pass."""
        count = len(rows) if active is None else len(active)
        self._choose_program(rows)
        self._ready(count, 0)
        p, ints = self._pass, self._buffers.ints
        p.num_rows = count
        for index, name in enumerate(_INT_FIELDS):
            source = getattr(rows, name)
            ints[index, :count] = source if active is None else source[active]
        p.adapters = None
        if rows.adapters is not None:
            ints[len(_INT_FIELDS), :count] = (
                rows.adapters if active is None else rows.adapters[active]
            )
            p.adapters = _address(ints[len(_INT_FIELDS)])
        self._bind_tables(rows)
        self._bind_cache(cache)

    def _bind_tables(self, rows: Rows) -> None:
        p, count = self._pass, len(rows.tables)
        self._tables = [np.ascontiguousarray(table, np.int32) for table in rows.tables]
        self._tails = np.ascontiguousarray(rows.tails, np.int32)
        p.num_tables = count
        if count > len(self._table_arrays[0]):
            kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
            self._table_arrays = pointers, strides, lengths = [(one * count)() for one in kinds]
            p.tables = ctypes.addressof(pointers)
            p.table_stride, p.table_length = ctypes.addressof(strides), ctypes.addressof(lengths)
        pointers, strides, lengths = self._table_arrays
        for index, table in enumerate(self._tables):
            pointers[index] = _address(table)
            lengths[index] = table.shape[-1]
            strides[index] = table.shape[1] if table.ndim == 2 else 0
        p.tails, p.num_tails = _address(self._tails), len(self._tails)

    def _bind_cache(self, cache: KeyValues) -> None:
        key = (cache.keys[0].data_ptr(), cache.values[-1].data_ptr(), cache.keys[0].shape[0])
        if cache is self._cache and key == self._cache_key:
            return
        dtype = cache.keys[0].dtype
        tensors = [*cache.keys, *cache.values]
        if cache.format not in _CACHE_CODES or any(t.dtype != dtype for t in tensors):
            raise InvalidRequestError(
                f"the cache has one of the formats {', '.join(CACHE_FORMATS)} throughout"
            )
        if not all(t.transpose(0, 1).is_contiguous() and t.device.type == "cpu" for t in tensors):
            raise InvalidRequestError("the cache lies head by head in main memory")
        pointer_list = ctypes.c_void_p * self._num_layers
        keys = pointer_list(*(t.data_ptr() for t in cache.keys))
        values = pointer_list(*(t.data_ptr() for t in cache.values))
        self._pass.keys, self._pass.values = ctypes.addressof(keys), ctypes.addressof(values)
        self._pass.cache_format = _CACHE_CODES[cache.format]
        self._pass.num_slots = cache.num_slots
        self._cache_arrays = (keys, values)
        self._cache, self._cache_key = cache, key

    def _set_inputs(self, rows: Rows, count: int) -> None:
        if rows.inputs is None:
            self._pass.inputs = None
            return
        self._inputs = rows.inputs.to(torch.float32).contiguous()
        if self._inputs.shape != (count, self._hidden_size):
            raise InvalidRequestError(_PROBLEMS[1])
        self._pass.inputs = self._inputs.data_ptr()

    def _taps(
        self, output_spec: OutputSpec, first: int, last: int
    ) -> tuple[Any, dict[int, torch.Tensor]]:
        self._pass.num_taps = len(output_spec.hidden)
        if not output_spec.hidden:
            return None, {}
        hidden = {
            layer: torch.empty(len(index), self._hidden_size)
            for layer, index in output_spec.hidden.items()
        }
        if any(not first <= layer <= last for layer in hidden):
            raise InvalidRequestError(f"rows run layers {first} to {last} have no other states")
        indices = [np.ascontiguousarray(index, np.int32) for index in output_spec.hidden.values()]
        taps = (Tap * len(hidden))()
        for tap, (layer, out), index in zip(taps, hidden.items(), indices, strict=True):
            tap.layer, tap.count = layer, len(index)
            tap.rows, tap.out = _address(index), out.data_ptr()
        self._pass.taps = ctypes.addressof(taps)
        return (taps, indices), hidden

    def _choose(self, choices: list[SampleSpec]) -> Any:
        count = len(choices)
        if count > len(self._choices):
            self._choices = (NativeChoice * (2 * count))()
            self._pass.choices = ctypes.addressof(self._choices)
        for to, choice in zip(self._choices, choices, strict=False):
            to.row, to.inverse_temperature, to.seed, to.stream, to.position = choice
        return self._choices

    def _call(
        self,
        first: int,
        last: int,
        logit_rows: np.ndarray | None,
        keep: Any = None,
        num_choices: int = 0,
        said: int = 1,
    ) -> None:
        """Run layers [first, last) and the head for `logit_rows`, and make the first `num_choices`
        of the choices; say up to `said` tokens. `keep` lives until it is done."""
        p, starts = self._pass, self._current.starts
        count = 0 if logit_rows is None else len(logit_rows)
        self._ready(max(p.num_rows, count), count)
        if logit_rows is not None and count:
            self._buffers.ints[len(_INT_FIELDS) + 1, :count] = logit_rows
        p.num_logits, p.num_choices, p.num_said = count, num_choices, said
        p.first, p.last = starts[first], starts[last]
        if p.num_taps or first < last:
            p.last += 1
        problem = self._library.run(self._pass_address, self.threads)
        if problem:
            raise InvalidRequestError(_PROBLEMS[problem])

    def _logits(self, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, self._vocab_size)
        views = self._buffers.views
        if count not in views:
            views[count] = self._buffers.out[:count]
        return views[count]

    def regroup(self, layer: Callable[[Backend, Any, int], Any] | None) -> None:
        """Run `layer` from now on in place of the network's own, over the same packed weights;
        None: the network's own again."""
        if layer is not None and layer not in self._others:
            embedding, scale, count, _, head = self._network
            self._others[layer] = record(self.packer, embedding, scale, count, layer, head, ())
        self._plain = self.program if layer is None else self._others[layer]

    # --- adapters

    def _choose_program(self, rows: Rows) -> None:
        if rows.adapters is None:
            if self._current is not self._plain:
                self._use(self._plain)
            return
        if self._adapted is None or self._loaded != len(self._adapters):
            self._load_adapters()
        if self._adapted is not None and self._current is not self._adapted:
            self._use(self._adapted)

    def _load_adapters(self) -> None:
        """Record the program anew with every matrix that any adapter changes."""
        names = {name for adapter in self._adapters for name in adapter}
        self._adapted = record(self.packer, *self._network, names)
        targets = self._adapted.targets
        self._loras = (Lora * (len(targets) * len(self._adapters) or 1))()
        self._lora_data: list[torch.Tensor] = []
        for number, adapter in enumerate(self._adapters):
            for index, name in enumerate(targets):
                if name in adapter:
                    self._set_lora(self._loras[number * len(targets) + index], adapter[name])
        self._pass.loras = ctypes.addressof(self._loras)
        self._pass.num_adapters, self._pass.num_targets = len(self._adapters), len(targets)
        self._loaded = len(self._adapters)

    def _set_lora(self, lora: Lora, delta: Any) -> None:
        down = delta.down.data.to(torch.float32).contiguous()
        up = (delta.up.data.to(torch.float32) * delta.scale).t().contiguous()
        self._lora_data += [down, up]
        lora.down, lora.up, lora.rank = down.data_ptr(), up.data_ptr(), len(down)
