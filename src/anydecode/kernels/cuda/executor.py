"""Runs a network through the Triton kernels: captured passes over padded rows, and following.

A pass of few rows is all launches. So it is padded to one of a few sizes, its integers are copied
into fixed memory, and the launches of the whole pass are replayed as one CUDA graph. Rows that pad
store nowhere and see nothing. `follow` goes further: pick, append and score again are captured too,
and the host comes back after several tokens.
"""

# Kernels are typed by Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cuda import sampling
from anydecode.kernels.cuda.available import COMPILED
from anydecode.kernels.cuda.backend import TritonBackend, is_narrow
from anydecode.kernels.cuda.graphs import CudaGraphs, Launch, NoGraphs, Recorder
from anydecode.kernels.cuda.rows import FIELDS, DeviceRows, layout
from anydecode.kernels.interface import (
    Adapter,
    Attention,
    Backend,
    KeyValues,
    Output,
    OutputSpec,
    Rows,
    Weight,
)

#: Passes of up to the last of these many rows are padded to one of them and captured. Larger ones
#: compute for longer than the host takes to launch them.
SIZES = (1, 2, 4, 8, 16, 32, 64)

_FEWEST_SEEN = 1 << 14
_MOST_STEPS = 64


@dataclass(frozen=True)
class SampleState:
    """How one sequence picks while it is followed: `inverse` of the temperature (0: greedy), and
    the noise's seed and stream. The noise's position is that of the token picked."""

    inverse: float = 0.0
    seed: int = 0
    stream: int = 0


@triton.jit(do_not_specialize=["size"])
def _advance_kernel(
    picked_ptr, ints_ptr, noise_ptr, slots_ptr, said_ptr, step_ptr, size, width, most,
    TOKENS: tl.constexpr, POSITIONS: tl.constexpr, SLOTS: tl.constexpr, PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every row goes on with the token picked for it, one position further."""
    row = tl.arange(0, BLOCK)
    there = row < size
    step = tl.load(step_ptr)
    token = tl.load(picked_ptr + row, mask=there, other=0)
    tl.store(said_ptr + row * most + step, token, mask=there)
    tl.store(ints_ptr + TOKENS * width + row, token, mask=there)
    place = tl.load(ints_ptr + POSITIONS * width + row, mask=there, other=0)
    prefix = tl.load(ints_ptr + PREFIX * width + row, mask=there, other=0)
    real = there & (prefix > 0)  # rows that pad stay where they are
    tl.store(ints_ptr + POSITIONS * width + row, place + 1, mask=real)
    tl.store(ints_ptr + PREFIX * width + row, prefix + 1, mask=real)
    noise = tl.load(noise_ptr + row * 4 + 2, mask=there, other=0)
    tl.store(noise_ptr + row * 4 + 2, noise + 1, mask=there)
    further = there & (row * 0 + step + 1 < most)
    slot = tl.load(slots_ptr + row * most + step + 1, mask=further, other=-1)
    tl.store(ints_ptr + SLOTS * width + row, slot, mask=there)
    tl.store(step_ptr, step + 1)


class StaticBuffers:
    """The memory that captured passes read and write."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        most = SIZES[-1]
        self.ints = torch.zeros(len(FIELDS), most, dtype=torch.int32, device=device)
        self.wanted = torch.zeros(most, dtype=torch.int64, device=device)
        self.logits = torch.empty(most, vocab_size, dtype=torch.float32, device=device)
        self.inverse = torch.zeros(most, dtype=torch.float64, device=device)
        self.noise = torch.zeros(most, 4, dtype=torch.int64, device=device)
        self.slots = torch.full((most, _MOST_STEPS), -1, dtype=torch.int32, device=device)
        self.said = torch.zeros(most, _MOST_STEPS, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen = torch.full((_FEWEST_SEEN,), -1, dtype=torch.int32, device=device)


class TritonExecutor:
    """Runs passes of one network. Implements the transformer's `Executor`, and `run` for passes
    that can be captured. Outputs are views that the next pass overwrites. Not for concurrent use.

    `layer(backend, x, index)` and `head(backend, x)` are the network, written against `Backend`;
    `shapes` are its layers' attention and `matrices` all its weights. Everything is packed here,
    once, in one pass of one row. `cache_dtype`: what its attention is fastest with.
    """

    def __init__(
        self,
        embedding: Weight,
        vocab_size: int,
        layer: Callable[[Backend, Any, int], Any],
        head: Callable[[Backend, Any], Any],
        shapes: Sequence[Attention],
        *,
        matrices: Iterable[Weight],
        embedding_scale: float = 1.0,
        adapters: Sequence[Adapter] = (),
        backend: TritonBackend | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.backend = backend or TritonBackend()
        self.device = self.backend.device
        self._embedding, self._scale = embedding, embedding_scale
        self._num_layers, self._layer, self._head = len(shapes), layer, head
        self._plain_layer = layer
        self._adapters = adapters
        narrow = torch.bfloat16 if is_narrow(list(matrices)) else torch.float32
        self.backend.narrow = self.cache_dtype = narrow
        on_gpu = self.device.type == "cuda"
        self._recorder: Recorder = recorder or (CudaGraphs() if on_gpu else NoGraphs())
        self._fixed = StaticBuffers(vocab_size, self.device)
        self._graphs: dict[tuple[Any, ...], Launch] = {}
        self._cache: KeyValues | None = None
        self._pass: tuple[Rows, KeyValues] | None = None
        self._pack(shapes)

    @torch.no_grad()
    def _pack(self, shapes: Sequence[Attention]) -> None:
        """A pass of one row that stores nowhere: it packs every weight as passes use it."""
        slots = [
            torch.zeros(1, s.num_kv_heads, s.head_dim, dtype=self.cache_dtype, device=self.device)
            for s in shapes
        ]
        cache = KeyValues(slots, slots)
        size = SIZES[0]
        rows = DeviceRows(self._fixed.ints[:, :size], self._fixed.seen)
        rows.slots.fill_(-1)
        self.backend.bind_device(rows, cache)
        self._forward(rows, 0, self._num_layers, None)
        self.backend.unbind()

    def regroup(self, layer: Callable[[Backend, Any, int], Any] | None) -> None:
        """Run `layer` from now on in place of the network's own; None: that again."""
        self._layer = layer or self._plain_layer

    def _forward(
        self, rows: DeviceRows, first: int, last: int, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        x: Any = self.backend.embed(rows.tokens, self._embedding, self._scale)
        for index in range(first, last):
            x = self._layer(self.backend, x, index)
        x = self.backend.force(x)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.backend.force(self._head(self.backend, x))

    # --- captured passes

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output | None:
        """A pass from tokens to logits as one replay; None where this pass cannot be one."""
        if not self._can_replay(rows, output_spec):
            return None
        size, wanted = _size(len(rows)), _size(len(output_spec.logits))
        self._use(cache)
        self._load(rows, size)
        self._fixed.wanted[: len(output_spec.logits)].copy_(
            torch.from_numpy(output_spec.logits.astype(np.int64))
        )
        stop = int(rows.stop[0])
        key = (self._layer, size, wanted, stop)
        if key in self._graphs:
            self._graphs[key]()
        else:
            self._graphs[key] = self._capture(lambda: self._score(size, wanted, stop))
        return Output(self._fixed.logits[: len(output_spec.logits)], {})

    def _can_replay(self, rows: Rows, output_spec: OutputSpec) -> bool:
        count = len(rows)
        return (
            0 < count <= SIZES[-1]
            and 0 < len(output_spec.logits) <= count
            and not output_spec.hidden
            and not self.backend.routes
            and rows.inputs is None
            and (rows.adapters is None or bool((rows.adapters < 0).all()))
            and bool((rows.start == 0).all() and (rows.stop == rows.stop[0]).all())
        )

    def _use(self, cache: KeyValues) -> None:
        if cache is not self._cache:
            self._graphs.clear()
            self._cache = cache

    def _load(self, rows: Rows, size: int) -> None:
        """Copy a pass into the fixed memory, padded to `size` rows."""
        ints, seen = layout(rows)
        padded = np.zeros((len(FIELDS), size), np.int32)
        padded[FIELDS.index("slots")] = -1
        padded[:, : len(rows)] = ints
        if len(seen) > len(self._fixed.seen):
            length = triton.next_power_of_2(len(seen))
            self._fixed.seen = torch.full((length,), -1, dtype=torch.int32, device=self.device)
            self._graphs.clear()
        if self.backend.grow_tables(int(rows.positions.max()) + _MOST_STEPS):
            self._graphs.clear()
        self._fixed.ints[:, :size].copy_(torch.from_numpy(padded))
        self._fixed.seen[: len(seen)].copy_(torch.from_numpy(seen))

    def _capture(self, run: Launch) -> Launch:
        self.backend.unbind()
        try:
            return self._recorder.capture(run)
        finally:
            self.backend.unbind()

    def _score(self, size: int, wanted: int, stop: int) -> None:
        """Logits of the wanted rows, from fixed memory to fixed memory."""
        assert self._cache is not None
        rows = DeviceRows(self._fixed.ints[:, :size], self._fixed.seen)
        self.backend.bind_device(rows, self._cache)
        logits = self._forward(rows, 0, stop, self._fixed.wanted[:wanted])
        self._fixed.logits[:wanted].copy_(logits)

    # --- following

    def follow(
        self, rows: Rows, cache: KeyValues, slots: np.ndarray, pick: Sequence[SampleState]
    ) -> np.ndarray:
        """Pick and score `count` tokens of each row's sequence on the device: int32 `[n, count]`.

        Each row is the last token of a sequence, sees a table and no tail, and lies at position
        prefix - 1. `slots` int32 `[n, count - 1]`: where the picked tokens but the last are stored.
        The last token's key is not computed. Raises InvalidRequestError for other rows.
        """
        count, steps = len(rows), slots.shape[1] + 1
        if (rows.tail_length != 0).any() or (rows.positions != rows.prefix - 1).any():
            raise InvalidRequestError("followed rows see all of their sequence and no tail")
        if steps > _MOST_STEPS or slots.shape[0] != count or len(pick) != count:
            raise InvalidRequestError(f"at most {_MOST_STEPS} tokens are followed at once")
        if not self._can_replay(rows, OutputSpec(np.arange(count, dtype=np.int32))):
            raise UnsupportedCombinationError("these rows cannot be followed on the device")
        size, stop = _size(count), int(rows.stop[0])
        self._use(cache)
        self._load(_with_room(rows, slots), size)
        self._load_picks(rows, slots, pick, size)
        key = (self._layer, size, -1, stop)
        if key not in self._graphs:
            # Capturing runs steps of its own, so the rows are loaded again behind it.
            self._graphs[key] = self._capture(lambda: self._step(size, stop))
            self._load(_with_room(rows, slots), size)
            self._load_picks(rows, slots, pick, size)
        for _ in range(steps):
            self._graphs[key]()
        said: np.ndarray = self._fixed.said[:count, :steps].cpu().numpy()
        return said

    def _load_picks(
        self, rows: Rows, slots: np.ndarray, pick: Sequence[SampleState], size: int
    ) -> None:
        fixed, count = self._fixed, len(rows)
        later = np.full((size, _MOST_STEPS), -1, np.int32)
        later[:count, 1 : slots.shape[1] + 1] = slots
        noise = np.zeros((size, 4), np.int64)
        noise[:count, 0] = np.array([p.seed & (1 << 64) - 1 for p in pick], np.uint64).view(
            np.int64
        )
        noise[:count, 1] = [p.stream for p in pick]
        noise[:count, 2] = rows.positions + 1
        inverse = np.zeros(size, np.float64)
        inverse[:count] = [p.inverse for p in pick]
        fixed.slots[:size].copy_(torch.from_numpy(later))
        fixed.noise[:size].copy_(torch.from_numpy(noise))
        fixed.inverse[:size].copy_(torch.from_numpy(inverse))
        fixed.wanted[:size].copy_(torch.arange(size))
        fixed.step.zero_()

    def _step(self, size: int, stop: int) -> None:
        """Score every row, pick, and put the picks in the rows' place."""
        fixed = self._fixed
        self._score(size, size, stop)
        picked = sampling.gumbel(fixed.logits[:size], fixed.inverse[:size], fixed.noise[:size])
        _advance_kernel[(1,)](
            picked.contiguous(), fixed.ints, fixed.noise, fixed.slots, fixed.said, fixed.step,
            size, fixed.ints.shape[1], _MOST_STEPS, TOKENS=FIELDS.index("tokens"),
            POSITIONS=FIELDS.index("positions"), SLOTS=FIELDS.index("slots"),
            PREFIX=FIELDS.index("prefix"), BLOCK=SIZES[-1], **COMPILED,
        )  # fmt: skip

    # --- the transformer's seam

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """A pass starts; the `layers` calls that follow belong to it."""
        self._pass = rows, cache

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Embeddings float32 `[m, hidden_size]`, scaled as the model wants them."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int32)).to(self.device)
        return self.backend.embed(ids, self._embedding, self._scale)

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        """States after layer `last - 1` of the rows `active`, from their states before `first`."""
        if self._pass is None:
            raise RuntimeError("begin a pass before running its layers")
        rows, cache = self._pass
        self.backend.bind(rows, active, cache, self._adapters)
        state: Any = x
        for index in range(first, last):
            state = self._layer(self.backend, state, index)
        return self.backend.force(state)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]` of states, final norm included."""
        self.backend.unbind()
        return self.backend.force(self._head(self.backend, x.contiguous()))


def _size(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def _with_room(rows: Rows, slots: np.ndarray) -> Rows:
    """The rows with a table each that has the slots of the tokens to come."""
    tables: list[np.ndarray] = []
    for row in range(len(rows)):
        table, prefix = rows.tables[rows.table[row]], int(rows.prefix[row])
        old = table[..., :prefix]
        new = np.broadcast_to(slots[row], (*old.shape[:-1], slots.shape[1]))
        tables.append(np.ascontiguousarray(np.concatenate((old, new), -1), np.int32))
    places = np.arange(len(rows), dtype=np.int32)
    return Rows(
        rows.tokens, rows.positions, rows.slots, tables, places, rows.prefix, rows.tails,
        rows.tail_start, rows.tail_length, rows.start, rows.stop,
    )  # fmt: skip
