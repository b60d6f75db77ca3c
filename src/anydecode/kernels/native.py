"""Runs a network with the C kernels: one call per pass over a recorded program."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cache import CACHE_FORMATS, new_cache
from anydecode.kernels.drafting import BoundDrafts
from anydecode.kernels.interface import (
    MAX_SEQUENCES,
    Adapter,
    Attention,
    Backend,
    BurstDrafter,
    KeyValues,
    LowRank,
    Output,
    OutputSpec,
    Recurrence,
    Rows,
    SampleSpec,
    Weight,
)
from anydecode.kernels.library import (
    FORMAT_CODES,
    Capture,
    Library,
    Lora,
    Pass,
    Truncation,
    load_library,
)
from anydecode.kernels.library import SampleSpec as NativeSampleSpec
from anydecode.kernels.mapped import address_of
from anydecode.kernels.packing import Packer, float_vector
from anydecode.kernels.program import Program, record
from anydecode.kernels.recurrent import PassStates, Scan, check_rows

_CACHE_CODES = {name: FORMAT_CODES[format] for name, format in CACHE_FORMATS.items()}
MAX_THREADS = 256  # of the pool in cpu/threads.c
MAX_PROGRAMS = 128  # of replaced layers and heads that are kept
_INT_FIELDS = ("tokens", "positions", "slots", "table", "prefix", "tail_start", "tail_length")
_ERRORS = {
    1: "a token is outside the vocabulary, or a row without a token has no input",
    2: "a slot is outside the cache",
    3: "a row refers to a slot table that is missing or too short",
    4: "a row refers to an adapter that is not loaded",
    5: "there is not enough memory for this pass",
}


def physical_cores() -> int:
    """The number of physical cores this process may run on."""
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
    """The number of threads to use: `threads`, or one per physical core where it is None.

    Raises:
        InvalidRequestError: `threads` is not an integer from 1 to `MAX_THREADS`.
    """
    if threads is None:
        return min(physical_cores(), MAX_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise InvalidRequestError(
            f"threads is {threads!r}; allowed is an integer from 1 to {MAX_THREADS}, or None for"
            " one per core"
        )
    return threads


class ExpertReads(NamedTuple):
    """What passes have read of the weights of experts.

    Attributes:
        experts: The experts that a row of a pass has chosen, in all layers and passes.
        num_bytes: The bytes of their packed matrices: each pass reads those of an expert once.
        num_stored: The bytes of the packed matrices of all experts, likewise.
    """

    experts: int
    num_bytes: int
    num_stored: int


class _Buffers:
    """The memory of a pass, grown to the largest pass so far."""

    def __init__(self, scratch_floats: int) -> None:
        self.rows = self.logits = self.floats = 0
        self.ints = np.empty((0, 0), np.int32)
        self.scratch = np.empty(max(1, scratch_floats), np.float32)

    def grow_rows(self, count: int, hidden_size: int) -> None:
        self.rows = max(count, 2 * self.rows)
        self.ints = np.zeros((len(_INT_FIELDS) + 2, self.rows), np.int32)
        self.stream = np.empty((self.rows, hidden_size), np.float32)

    def grow_floats(self, count: int) -> None:
        self.floats = count
        self.workspace = np.empty(count + 16, np.float32)

    def grow_logits(self, count: int, head_size: int) -> None:
        self.logits = count
        self.out = np.empty((count, head_size), np.float32)
        self.views: dict[int, np.ndarray] = {}  # number of rows -> view of the first rows


class NativeExecutor:
    """Runs passes of one network with the C kernels.

    Implements the transformer's `Executor`, and `run`: a whole pass in one call. Outputs are views
    that the next pass overwrites. Not safe for concurrent use.

    Args:
        embedding: The token embedding `[vocab_size, hidden_size]`.
        num_logits: Number of logits per row.
        num_layers: Number of layers.
        layer: `layer(backend, x, index)`, one layer written against `Backend`.
        head: `head(backend, x)`, the final norm and the output projection.
        embedding_scale: Factor of the embeddings.
        reads_states: Whether the hidden states of all rows start as `Rows.inputs`.
        carries_states: Whether, with `reads_states`, the hidden state of one step is the input of
            the next in a multi-step pass; without it such passes have one step.
        head_tokens: The tokens of a head that has fewer than the vocabulary, int64 `[num_logits]`.
        width: Numbers per hidden state; None: as many as the embedding has. Where there are more,
            those of the first layer start as an embedding and zeros.
        packer: The packer of another network with which this one shares weights.
        adapters: The loaded LoRA adapters; may grow later.
        threads: Number of threads; None: one per physical core.
        library: The compiled kernels; None: those of this machine.
        free_weights: Whether the weights are freed as they are packed.

    Raises:
        UnsupportedCombinationError: The native kernels are not available.
    """

    cache_formats = tuple(CACHE_FORMATS)

    def __init__(
        self,
        embedding: Weight,
        num_logits: int,
        num_layers: int,
        layer: Callable[[Backend, Any, int], Any],
        head: Callable[[Backend, Any], Any],
        *,
        embedding_scale: float = 1.0,
        reads_states: bool = False,
        carries_states: bool = False,
        head_tokens: np.ndarray | None = None,
        width: int | None = None,
        packer: Packer | None = None,
        adapters: Sequence[Adapter] = (),
        threads: int | None = None,
        library: Library | None = None,
        free_weights: bool = False,
    ) -> None:
        loaded = library or load_library()
        if loaded is None:
            raise UnsupportedCombinationError("the native kernels are not available here")
        self._library = loaded
        self.threads = thread_count(threads)
        self.threads_in_use = self.threads  # by the next pass
        self.packer = packer or Packer(loaded, self.threads, free_weights)
        self._hidden_size, self._num_logits = width or embedding.in_features, num_logits
        self._network = (embedding, embedding_scale, num_layers, layer, head, self._hidden_size)
        self._adapters, self._loaded = adapters, list[Adapter]()
        self._embedding_size = embedding.in_features
        self._input_size = self._hidden_size if reads_states else self._embedding_size
        self._reads_states = reads_states
        self._num_layers = num_layers
        self.program = record(self.packer, *self._network, (), reads_states)
        self._adapted: Program | None = None  # the program with the adapters
        self._regrouped: dict[Any, Program] = {}  # by layer and head
        self._plain = self.program
        # Products with quantised weights round activations to eight bits anyway.
        self.cache_format = "float16" if self.packer.has_quantised else "float32"
        self._cache_ends: tuple[Any, Any] = (None, None)  # of the bound cache
        self._rows: Rows | None = None
        self._bound_rows: bytes | None = None  # indices of the rows that `layers` has bound
        self._states: PassStates | None = None  # of the recurrences, in the current pass
        self._pass = Pass(
            num_layers=num_layers, head_size=num_logits, hidden_size=self._hidden_size
        )
        self._pass_address = ctypes.addressof(self._pass)
        self._pass.carries_states = carries_states
        self.head_tokens = head_tokens
        self._can_sample = head_tokens is None or bool((np.diff(head_tokens) > 0).all())
        self._can_continue = self._can_sample and carries_states >= reads_states
        if head_tokens is not None and self._can_sample:
            self._head_tokens = head_tokens.astype(np.int32)
            self._spread = np.full(embedding.out_features, -np.inf, np.float32)
            self._pass.vocab_size = embedding.out_features
            self._pass.head_tokens = address_of(self._head_tokens)
            self._pass.spread = address_of(self._spread)
        self._samples: Any = ()
        self._multi_step_tokens = np.empty(0, np.int32)
        self._step_probabilities = np.empty(0, np.float32)
        self._step_limits, self._step_counts = np.zeros((2, MAX_SEQUENCES + 1), np.int32)
        self._min_probabilities = np.zeros(MAX_SEQUENCES)
        self._pass.step_limits = address_of(self._step_limits)
        self._pass.step_counts = address_of(self._step_counts)
        self._pass.min_probabilities = address_of(self._min_probabilities)
        self._end_tokens: frozenset[int] | None = None
        self._table_arrays: Any = ((), (), ())
        self._expert_reads = np.zeros(3, np.int64)
        self._pass.expert_reads = address_of(self._expert_reads)
        sizes = ((shape.top_k or 0) * shape.num_selections for shape in self.program.shapes)
        self._num_selected = max(sizes, default=0)
        floats = self._scratch_floats()
        self._buffers = _Buffers(floats * self.threads)
        self._pass.attention_scratch_floats = floats
        self._pass.attention_scratch = address_of(self._buffers.scratch)
        self._use(self.program)

    def _scratch_floats(self) -> int:
        sizes = {(s.head_dim, s.num_heads // s.num_kv_heads) for s in self.program.shapes}
        sizes |= {(dim, 1) for dim in self.program.index_dims}
        floats = [int(self._library.attention_floats(*size)) for size in sizes]
        states = (s.state_shape for s in self.program.recurrences)
        sizes = {state[1:] for state in states if state is not None}
        floats += [int(self._library.recurrence_floats(*size)) for size in sizes]
        return max(floats, default=0)

    def _use(self, program: Program) -> None:
        self._current = program
        p = self._pass
        p.ops, p.num_ops = ctypes.addressof(program.ops), program.num_ops
        p.num_prologue, p.head = program.num_prologue, program.head
        p.head_offset = program.body_floats

    def new_cache(
        self,
        format: str,
        num_slots: int,
        shapes: Sequence[Attention | None],
        recurrences: Mapping[int, Recurrence] = MappingProxyType({}),
    ) -> KeyValues:
        """A key-value cache of zeros, see `kernels.cache.new_cache`."""
        return new_cache(format, num_slots, shapes, recurrences)

    # --- a whole pass

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass over all layers, from tokens to the outputs of `output_spec`."""
        count = len(rows)
        start, stop = int(rows.start[0]) if count else 0, int(rows.stop[0]) if count else 0
        if not count or (
            count > 1 and not ((rows.start == start).all() and (rows.stop == stop).all())
        ):
            return self._run_parts(rows, cache, output_spec)
        if cache.inputs:
            self._begin_states(rows, cache)
        if output_spec.drafts:
            self._select_program(rows)
            max_rows = count + len(output_spec.drafts[0].costs) - 1
            self._reserve(max_rows, max_rows)
        self._bind(rows, cache, None)
        self._pass.embed = 1
        self._set_inputs(rows.inputs, count)
        captures, hidden = self._bind_captures(output_spec, start, stop)
        samples = output_spec.samples if self._can_sample else []
        specs = self._bind_samples(samples)
        if output_spec.step_limits:
            num_steps = self._max_steps(rows, output_spec.step_limits)
            if num_steps > 1:
                output = self._run_steps(output_spec, num_steps, start, stop, captures, hidden)
                if self._states is not None and len(output.steps[0]) > 1:
                    position = rows.positions[-1] + len(output.steps[0]) - 1
                    slot = rows.tables[rows.table[-1]][position]
                    cache.states.move(self._states.last_state, int(slot))
                return output
        self._call(start, stop, output_spec.logits, captures, len(samples))
        sampled = [specs[i].token for i in range(len(samples))]
        return Output(self._logits(len(output_spec.logits)), hidden, sampled)

    @property
    def kernels(self) -> str:
        """A name of the code that computes the passes; another build or variant has another."""
        return f"{self._library.variant} of {self._library.build}"

    def take_expert_reads(self) -> ExpertReads:
        """The weights of experts that the passes since the last call have read."""
        reads = ExpertReads(*self._expert_reads.tolist())
        self._expert_reads[:] = 0
        return reads

    def _max_steps(self, rows: Rows, step_limits: list[int]) -> int:
        """The number of steps that a pass may have here; see `OutputSpec.step_limits`."""
        if not self._can_continue or any(table.ndim > 1 for table in rows.tables):
            return 1
        if self._states is None:
            return max(step_limits)
        return min(step_limits[0], self._states.max_steps) if len(step_limits) == 1 else 1

    def _run_steps(
        self,
        output_spec: OutputSpec,
        num_steps: int,
        start: int,
        stop: int,
        captures: Any,
        hidden: dict[int, np.ndarray],
    ) -> Output:
        """Run a bound pass with up to `num_steps` steps of each sequence."""
        count, drafts = len(output_spec.step_limits), output_spec.drafts
        self._bind_multi_step(count, num_steps, output_spec)
        bound = None
        if drafts and self.drafts_in_bursts:
            table = self._tables[0] if len(self._tables) == 1 else None
            bound = BoundDrafts(drafts, output_spec.step_limits, table)
            self._pass.drafting = bound.address
        self._call(start, stop, output_spec.logits, captures, count, num_steps)
        if bound is not None:
            bound.store()
        *counts, num_passes = self._step_counts[: count + 1].tolist()
        firsts = range(0, count * num_steps, num_steps)
        parts = [slice(first, first + n) for first, n in zip(firsts, counts, strict=True)]
        steps = [self._multi_step_tokens[part].tolist() for part in parts]
        chances = []
        if output_spec.min_probabilities:
            chances = [self._step_probabilities[part].tolist() for part in parts]
        sampled = [tokens[0] if tokens else -1 for tokens in steps]
        logits = self._logits(len(output_spec.logits))
        return Output(logits, hidden, sampled, num_passes, steps, chances)

    @property
    def truncates(self) -> bool:
        """Whether samples may have a truncation (`SampleSpec.truncation`)."""
        return self._can_sample and not self.program.recurrences

    @property
    def drafts_in_bursts(self) -> bool:
        """Whether the steps of a multi-step pass may have drafts (`OutputSpec.drafts`)."""
        has_states = bool(self.program.recurrences) or self._reads_states
        return self._can_continue and not has_states and not self._pass.head_tokens

    def _bind_multi_step(self, count: int, num_steps: int, output_spec: OutputSpec) -> None:
        """Bind what a pass with several steps of `count` sequences has beside others."""
        p, end_tokens = self._pass, output_spec.end_tokens
        if end_tokens is not self._end_tokens:
            self._end_tokens = end_tokens
            self._end_token_array = np.array(sorted(end_tokens), np.int32)
            p.end_tokens, p.num_end_tokens = address_of(self._end_token_array), len(end_tokens)
        if count * num_steps > len(self._multi_step_tokens):
            self._multi_step_tokens = np.empty(2 * count * num_steps, np.int32)
            self._step_probabilities = np.empty(2 * count * num_steps, np.float32)
            p.multi_step_tokens = address_of(self._multi_step_tokens)
        self._step_limits[:count] = output_spec.step_limits
        p.interrupt = p.step_probabilities = p.drafting = None
        if output_spec.interrupt is not None:
            p.interrupt = address_of(output_spec.interrupt)
        if output_spec.min_probabilities:
            self._min_probabilities[:count] = output_spec.min_probabilities
            p.step_probabilities = address_of(self._step_probabilities)

    def _run_parts(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run rows with different layer ranges: one call per range of layers."""
        x = self._initial_states(rows)
        hidden: dict[int, np.ndarray] = {}
        self.begin(rows, cache)
        bounds = sorted({*rows.start.tolist(), *rows.stop.tolist(), *output_spec.hidden})
        for first, last in zip(bounds, [*bounds[1:], None], strict=True):
            if first in output_spec.hidden:
                hidden[first] = x[output_spec.hidden[first]]
            active = np.flatnonzero((rows.start <= first) & (rows.stop >= (last or first)))
            if last is not None and len(active):
                x[active] = self.layers(x[active], active, first, last)
        return Output(self.head(x[output_spec.logits]), hidden)

    def _initial_states(self, rows: Rows) -> np.ndarray:
        if self._reads_states and rows.inputs is not None:
            return np.array(rows.inputs, np.float32)
        x = np.zeros((len(rows), self._hidden_size), np.float32)
        with_token = np.flatnonzero(rows.tokens >= 0)
        if rows.inputs is not None:
            x[:, : rows.inputs.shape[1]] = rows.inputs
        elif len(with_token) < len(rows):
            raise InvalidRequestError(_ERRORS[1])
        if len(with_token):
            x[with_token, : self._embedding_size] = self.embed(rows.tokens[with_token])
        return x

    # --- ranges of layers

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """Start a pass: the following `layers` calls belong to it."""
        self._rows, self._cache_in_use, self._bound_rows = rows, cache, None
        self._reserve(len(rows), 0)  # what layers select is kept until the pass ends
        if cache.inputs:
            self._begin_states(rows, cache)

    def _begin_states(self, rows: Rows, cache: KeyValues) -> None:
        """Check the rows of a pass with recurrent layers, and choose the states it uses."""
        check_rows(rows, cache.states is not None)
        self._states = None if cache.states is None else cache.states.begin(rows)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Scaled embeddings float32 `[m, hidden_size]` of int32 `tokens` `[m]`."""
        count = len(tokens)
        self._reserve(count, 0)
        self._bound_rows = None
        self._buffers.ints[0, :count] = tokens
        self._pass.embed, self._pass.inputs = 1, None
        self._pass.num_rows, self._pass.num_captures = count, 0
        self._pass.adapters = None
        self._call(0, 0, None)
        return self._buffers.stream[:count, : self._embedding_size].copy()

    def layers(self, x: np.ndarray, active: np.ndarray, first: int, last: int) -> np.ndarray:
        """Run layers [first, last) for some rows of the pass.

        Args:
            x: Hidden states before layer `first`, float32 `[m, hidden_size]`.
            active: Indices of the rows, `[m]`.
            first: The first layer.
            last: One past the last layer.

        Returns:
            Hidden states after layer `last - 1`, float32 `[m, hidden_size]`.
        """
        if self._rows is None:
            raise RuntimeError("`layers` was called before `begin`")
        indices = active.astype(np.int64).tobytes()
        if indices == self._bound_rows:  # a pass in many parts: only the program may be another
            self._select_program(self._rows)
            self._pass.num_rows, self._pass.adapters = len(active), None
        else:
            self._bind(self._rows, self._cache_in_use, active)
            if self._states is None and self._rows.adapters is None:
                self._bound_rows = indices
        self._pass.embed, self._pass.num_captures = 0, 0
        inputs = self._rows.inputs
        self._set_inputs(None if inputs is None else inputs[active], len(active))
        self._buffers.stream[: len(active)] = x
        self._call(first, last, None)
        return self._buffers.stream[: len(active)].copy()

    def head(self, x: np.ndarray) -> np.ndarray:
        """Logits float32 `[m, head_size]` of hidden states, through the final norm.

        The logits of the last pass are not overwritten.
        """
        count = len(x)
        if not count:
            return np.empty((0, self._num_logits), np.float32)
        self._reserve(count, count)
        self._pass.embed, self._pass.num_captures, self._pass.num_rows = 0, 0, count
        self._pass.adapters = None
        self._buffers.stream[:count] = x
        logits = np.empty((count, self._num_logits), np.float32)
        self._pass.logits = address_of(logits)
        try:
            self._call(0, 0, np.arange(count, dtype=np.int32))
        finally:
            self._pass.logits = address_of(self._buffers.out)
        return logits

    def linear(self, x: np.ndarray, weight: Weight, bias: np.ndarray | None = None) -> np.ndarray:
        """x @ weight.T + bias, float32 `[m, out_features]`, for float32 `[m, in_features]`."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), weight.out_features), np.float32)
        scratch = np.empty(2 * x.size + 64, np.uint8)  # rows quantised to int8, with their scales
        matrix, padded = self.packer.pack(weight), None if bias is None else float_vector(bias)
        self._library.linear(
            ctypes.byref(matrix),
            address_of(x),
            len(x),
            None if padded is None else address_of(padded),
            address_of(out),
            address_of(scratch),
        )
        return out

    def read_rows(self, weight: Weight, rows: np.ndarray) -> np.ndarray:
        """The values of some rows of a matrix, float32 `[rows, in_features]`.

        Raises:
            IndexError: The matrix has no such row.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < weight.out_features:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {weight.out_features}")
        matrix = ctypes.byref(self.packer.pack(weight))
        values = np.empty((len(rows), weight.in_features), np.float32)
        first, stride = address_of(values), values.strides[0]
        for index, row in enumerate(rows.tolist()):
            self._library.unpack_row(matrix, row, first + index * stride)
        return values

    # --- the arguments of a pass

    def _reserve(self, rows: int, logits: int) -> None:
        """Grow the buffers to this many rows and logits."""
        b, p = self._buffers, self._pass
        if rows > b.rows:
            self._bound_rows = None
            b.grow_rows(rows, self._hidden_size)
            for index, name in enumerate(_INT_FIELDS):
                setattr(p, name, address_of(b.ints[index]))
            p.stream = address_of(b.stream)
            if self._num_selected:
                self._selected = np.empty((b.rows, self._num_selected), np.int32)
                p.selected = address_of(self._selected)
            p.logit_rows = address_of(b.ints[len(_INT_FIELDS) + 1])
        if logits > b.logits:
            b.grow_logits(logits, self._num_logits)
            p.logits = address_of(b.out)
        floats = rows * self._current.body_floats + logits * self._current.head_floats
        if floats > b.floats:
            b.grow_floats(floats)
            p.workspace = -(-address_of(b.workspace) // 64) * 64

    def _bind(self, rows: Rows, cache: KeyValues, active: np.ndarray | None) -> None:
        """Set the rows (or those of index `active`), their tables and the cache in the pass."""
        count = len(rows) if active is None else len(active)
        self._bound_rows = None
        self._select_program(rows)
        self._reserve(count, 0)
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
            p.adapters = address_of(ints[len(_INT_FIELDS)])
        p.selected_rows = None
        if self._num_selected and active is not None:
            self._selected_rows = active.astype(np.int32)
            p.selected_rows = address_of(self._selected_rows)
        self._bind_tables(rows)
        self._bind_cache(cache)
        if self._states is not None:
            indices = np.arange(count) if active is None else active
            self._bind_scan(self._states.scan(indices))

    def _bind_scan(self, scan: Scan) -> None:
        p, self._scan = self._pass, scan
        p.num_runs, p.scan_lead = len(scan.start), scan.lead
        for name in ("start", "first", "slots", "rows", "saves"):
            setattr(p, f"scan_{name}", address_of(getattr(scan, name)))

    def _bind_tables(self, rows: Rows) -> None:
        p, count = self._pass, len(rows.tables)
        self._tables = [np.ascontiguousarray(table, np.int32) for table in rows.tables]
        self._tails = np.ascontiguousarray(rows.tails, np.int32)
        p.num_tables = count
        if count > len(self._table_arrays[0]):
            types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
            self._table_arrays = pointers, strides, lengths = [(ctype * count)() for ctype in types]
            p.tables = ctypes.addressof(pointers)
            p.table_stride, p.table_length = ctypes.addressof(strides), ctypes.addressof(lengths)
        pointers, strides, lengths = self._table_arrays
        for index, table in enumerate(self._tables):
            pointers[index] = address_of(table)
            lengths[index] = table.shape[-1]
            strides[index] = table.shape[1] if table.ndim == 2 else 0
        p.tails, p.num_tails = address_of(self._tails), len(self._tails)

    def _bind_cache(self, cache: KeyValues) -> None:
        first, last = self._cache_ends
        if cache.keys[0] is first and cache.values[-1] is last:
            return
        dtype = cache.keys[0].dtype
        arrays = [*cache.keys, *cache.values]
        if cache.format not in _CACHE_CODES or any(x.dtype != dtype for x in arrays):
            raise InvalidRequestError(
                f"the cache's format is {cache.format!r} or differs between layers; allowed is one"
                f" of {', '.join(CACHE_FORMATS)} for all layers"
            )
        if not all(x.swapaxes(0, 1).flags.c_contiguous for x in arrays):
            raise InvalidRequestError(
                "the cache does not have each head's slots contiguous; make it with `new_cache`"
            )
        pointer_list = ctypes.c_void_p * self._num_layers
        keys = pointer_list(*(address_of(x) for x in cache.keys))
        values = pointer_list(*(address_of(x) for x in cache.values))
        self._pass.keys, self._pass.values = ctypes.addressof(keys), ctypes.addressof(values)
        self._pass.cache_format = _CACHE_CODES[cache.format]
        self._pass.num_slots = cache.num_slots
        self._cache_arrays = (keys, values, *self._bind_recurrent(cache))
        self._cache_ends = (cache.keys[0], cache.values[-1])

    def _bind_recurrent(self, cache: KeyValues) -> list[Any]:
        """Set the inputs and states of the recurrences; returns the arrays of their addresses."""
        states = {} if cache.states is None else cache.states.arrays
        bound = []
        for name, arrays in (("recurrent_inputs", cache.inputs), ("states", states)):
            pointers = (ctypes.c_void_p * self._num_layers)()
            for layer, array in arrays.items():
                pointers[layer] = address_of(array)
            setattr(self._pass, name, ctypes.addressof(pointers))
            bound.append(pointers)
        return bound

    def _set_inputs(self, inputs: np.ndarray | None, count: int) -> None:
        if inputs is None:
            self._pass.inputs = None
            return
        self._inputs = np.ascontiguousarray(inputs, np.float32)
        if self._inputs.shape != (count, self._input_size):
            raise InvalidRequestError(_ERRORS[1])
        self._pass.inputs = address_of(self._inputs)

    def _bind_captures(
        self, output_spec: OutputSpec, first: int, last: int
    ) -> tuple[Any, dict[int, np.ndarray]]:
        self._pass.num_captures = len(output_spec.hidden)
        if not output_spec.hidden:
            return None, {}
        hidden = {
            layer: np.empty((len(index), self._hidden_size), np.float32)
            for layer, index in output_spec.hidden.items()
        }
        if any(not first <= layer <= last for layer in hidden):
            raise InvalidRequestError(
                f"hidden states were requested after layers {sorted(hidden)}; rows that run from"
                f" layer {first} to {last} have only those in between"
            )
        indices = [np.ascontiguousarray(index, np.int32) for index in output_spec.hidden.values()]
        captures = (Capture * len(hidden))()
        for capture, (layer, out), index in zip(captures, hidden.items(), indices, strict=True):
            capture.layer, capture.count = layer, len(index)
            capture.rows, capture.out = address_of(index), address_of(out)
            capture.stride = self._hidden_size
        self._pass.captures = ctypes.addressof(captures)
        return (captures, indices), hidden

    def _bind_samples(self, specs: list[SampleSpec]) -> Any:
        count = len(specs)
        if count > len(self._samples):
            self._samples = (NativeSampleSpec * (2 * count))()
            self._pass.samples = ctypes.addressof(self._samples)
        self._truncations = [spec.truncation and Truncation.of(spec.truncation) for spec in specs]
        for native, spec, rule in zip(self._samples, specs, self._truncations, strict=False):
            native.row, native.inverse_temperature, native.seed, native.stream, native.position = (
                spec[:5]
            )
            native.truncation = None if rule is None else ctypes.addressof(rule)
        return self._samples

    def _call(
        self,
        first: int,
        last: int,
        logit_rows: np.ndarray | None,
        keep_alive: Any = None,
        num_samples: int = 0,
        num_steps: int = 1,
    ) -> None:
        """Run layers [first, last) and the head for `logit_rows`, for up to `num_steps` steps.

        The first `num_samples` of the bound samples are sampled. `keep_alive` is referenced until
        the call returns.
        """
        p, starts = self._pass, self._current.starts
        count = 0 if logit_rows is None else len(logit_rows)
        self._reserve(max(p.num_rows, count), count)
        if logit_rows is not None and count:
            self._buffers.ints[len(_INT_FIELDS) + 1, :count] = logit_rows
        p.num_logits, p.num_samples, p.num_steps = count, num_samples, num_steps
        p.first, p.last = starts[first], starts[last]
        if p.num_captures or first < last:
            p.last += 1
        problem = self._library.run(self._pass_address, self.threads_in_use)
        if problem:
            raise InvalidRequestError(_ERRORS[problem])

    def _logits(self, count: int) -> np.ndarray:
        if not count:
            return np.empty((0, self._num_logits), np.float32)
        views = self._buffers.views
        if count not in views:
            views[count] = self._buffers.out[:count]
        return views[count]

    def processor_seconds(self) -> float:
        """The processor time that the calling thread and the threads of the kernels have used, in
        seconds."""
        seconds: float = self._library.processor_seconds()
        return seconds if seconds >= 0 else process_time()

    def beside(self, team: int) -> NativeExecutor | None:
        """An executor over the same weights and adapters, or None if there is only one thread.

        Its passes can run at the same time as those of executors of the other team, and as passes
        with a single thread.

        Args:
            team: The team of threads that run its passes, 0 or 1; that of this executor is 0.
        """
        if self.threads == 1:
            return None
        other = self._like(adapters=self._adapters)
        other._pass.team = team
        return other

    def compiled_as(self, library: Library) -> NativeExecutor:
        """An executor over the same packed weights and adapters with other kernels."""
        return self._like(adapters=self._adapters, library=library)

    def _like(self, **changes: Any) -> NativeExecutor:
        """An executor of the same network over the same packed weights, with these options
        changed."""
        embedding, scale, num_layers, layer, head, width = self._network
        options: dict[str, Any] = {
            "embedding_scale": scale,
            "reads_states": self._reads_states,
            "carries_states": bool(self._pass.carries_states),
            "head_tokens": self.head_tokens,
            "width": width,
            "packer": self.packer,
            "threads": self.threads,
            "library": self._library,
        }
        return NativeExecutor(
            embedding, self._num_logits, num_layers, layer, head, **{**options, **changes}
        )

    def regroup(
        self,
        layer: Callable[[Backend, Any, int], Any] | None,
        head: Callable[[Backend, Any], Any] | None = None,
    ) -> None:
        """Replace the network's `layer` and `head` from now on, over the same packed weights.

        Args:
            layer: The replacement; None: the network's own `layer` and `head` again.
            head: The replacement; None: the network's own `head`.
        """
        key = layer, head
        if layer is not None and key not in self._regrouped:
            embedding, scale, count, _, own_head, width = self._network
            functions = layer, head or own_head
            while len(self._regrouped) >= MAX_PROGRAMS:
                del self._regrouped[next(iter(self._regrouped))]
            self._regrouped[key] = record(
                self.packer, embedding, scale, count, *functions, width, (), self._reads_states
            )
        self._plain = self.program if layer is None else self._regrouped[key]

    # --- drafts of another network

    def chains(self, project: Callable[[Backend, Any], Any], width: int) -> Chains | None:
        """This drafter's part of its target's multi-step passes (`BurstDrafter.chains`); None where
        its states do not go from step to step as they are.

        Args:
            project: `project(backend, x)`: from the target's states, side by side, to the inputs of
                this network.
            width: Numbers of the target's states.
        """
        if not (self._can_continue and self._reads_states):
            return None
        embedding, *_, layer, _, hidden_size = self._network
        projection = NativeExecutor(
            embedding,
            hidden_size,
            0,
            layer,
            project,
            reads_states=True,
            width=width,
            packer=self.packer,
            threads=self.threads,
            library=self._library,
        )
        return Chains(self._like(carries_states=True), projection)

    def bind_steps(self, rows: Rows, cache: KeyValues) -> tuple[int, int]:
        """The addresses of a pass over all layers, of which C code runs some of `rows` at a time,
        and the head for one of them, and of the rows' tokens."""
        self._bind(rows, cache, None)
        self._reserve(len(rows), 1)
        p, starts = self._pass, self._current.starts
        p.embed, p.first, p.last = 1, starts[0], starts[-1] + 1
        return self._pass_address, address_of(self._buffers.ints[0])

    def bind_head(self, count: int) -> int:
        """The address of a pass of the head alone, of which C code runs up to `count` rows."""
        self._reserve(count, count)
        self._buffers.ints[len(_INT_FIELDS) + 1, :count] = np.arange(count)
        p, start = self._pass, self._current.starts[0]
        p.embed, p.first, p.last = 1, start, start
        return self._pass_address

    # --- adapters

    def _select_program(self, rows: Rows) -> None:
        if rows.adapters is None:
            if self._current is not self._plain:
                self._use(self._plain)
            return
        if self._adapted is None or not _are_same(self._loaded, self._adapters):
            self._load_adapters()
        if self._adapted is not None and self._current is not self._adapted:
            self._use(self._adapted)

    def _load_adapters(self) -> None:
        """Record the program again, with every matrix that any adapter targets."""
        self._loaded = list(self._adapters)
        names = {name for adapter in self._loaded for name in adapter}
        self._adapted = record(self.packer, *self._network, names, self._reads_states)
        targets = self._adapted.targets
        self._loras = (Lora * (len(targets) * len(self._loaded) or 1))()
        self._lora_data: list[np.ndarray] = []
        for number, adapter in enumerate(self._loaded):
            for index, name in enumerate(targets):
                if name in adapter:
                    self._set_lora(self._loras[number * len(targets) + index], adapter[name])
        self._pass.loras = ctypes.addressof(self._loras)
        self._pass.num_adapters, self._pass.num_targets = len(self._loaded), len(targets)

    def _set_lora(self, lora: Lora, update: LowRank) -> None:
        down = np.ascontiguousarray(update.down.data, np.float32)
        up = np.ascontiguousarray((update.up.data * np.float32(update.scale)).T, np.float32)
        self._lora_data += [down, up]
        lora.down, lora.up, lora.rank = address_of(down), address_of(up), len(down)


class Chains:
    """A drafter's part of its target's multi-step passes, on buffers of its own: `chain` runs the
    drafter, and the head of `projection`, which has no layers, makes its inputs of the target's
    states."""

    def __init__(self, chain: NativeExecutor, projection: NativeExecutor) -> None:
        self._chain, self._projection = chain, projection

    def bind(self, drafter: BurstDrafter, capacity: int, slots: np.ndarray) -> tuple[int, int, int]:
        """The addresses of the passes of drafter and projection, and of the tokens of their rows,
        of which there are `capacity`, with these slots."""
        zeros = np.zeros(capacity, np.int32)
        tokens, positions = zeros.copy(), np.arange(capacity, dtype=np.int32) + drafter.first
        tokens[: len(drafter.tokens)] = drafter.tokens
        table = np.ascontiguousarray(drafter.table[: drafter.first + capacity])
        rows = Rows(
            tokens=tokens,
            positions=positions,
            slots=slots,
            tables=[table],
            table=zeros,
            prefix=positions + 1,
            tails=zeros[:0],
            tail_start=zeros,
            tail_length=zeros,
            start=zeros,
            stop=zeros,
        )
        chain, row_tokens = self._chain.bind_steps(rows, drafter.cache)
        return chain, self._projection.bind_head(capacity), row_tokens


def _are_same(some: Sequence[Adapter], others: Sequence[Adapter]) -> bool:
    """Whether two lists have the same adapters, not equal ones."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
