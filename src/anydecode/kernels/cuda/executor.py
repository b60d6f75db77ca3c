"""Runs a network with the Triton kernels: captured passes over padded rows, and multi-step passes.

The time of a pass of few rows is launch overhead. So the pass is padded to one of a few sizes, its
integers are copied into fixed memory, and its launches are replayed as one CUDA graph. Padding rows
store nothing and attend to nothing. `multi_step` also captures sampling and appending the token, so
the host waits once for several tokens.
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
from anydecode.kernels.cuda.backend import TritonBackend, all_take_bfloat16
from anydecode.kernels.cuda.graphs import CudaGraphs, Launch, NoGraphs, Recorder
from anydecode.kernels.cuda.rows import FIELDS, DeviceRows, layout
from anydecode.kernels.eager import TorchExecutor
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
from anydecode.kernels.torch_arrays import as_tensor

#: Numbers of rows to which captured passes are padded. Larger passes are not captured: they compute
#: for longer than the host needs to launch them.
SIZES = (1, 2, 4, 8, 16, 32, 64)

_MIN_VISIBLE = 1 << 14
_MAX_STEPS = 64


@dataclass(frozen=True)
class SampleState:
    """How a sequence samples in a multi-step pass.

    `inverse_temperature` 0 is greedy. `seed` and `stream` select the noise, whose position is that
    of the sampled token.
    """

    inverse_temperature: float = 0.0
    seed: int = 0
    stream: int = 0


@triton.jit(do_not_specialize=["size"])
def _advance_kernel(
    sampled_ptr, ints_ptr, noise_ptr, slots_ptr, tokens_ptr, step_ptr, size, width, max_steps,
    TOKENS: tl.constexpr, POSITIONS: tl.constexpr, SLOTS: tl.constexpr, PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set every row to its sampled token, at the next position."""
    row = tl.arange(0, BLOCK)
    inside = row < size
    step = tl.load(step_ptr)
    token = tl.load(sampled_ptr + row, mask=inside, other=0)
    tl.store(tokens_ptr + row * max_steps + step, token, mask=inside)
    tl.store(ints_ptr + TOKENS * width + row, token, mask=inside)
    position = tl.load(ints_ptr + POSITIONS * width + row, mask=inside, other=0)
    prefix = tl.load(ints_ptr + PREFIX * width + row, mask=inside, other=0)
    is_real = inside & (prefix > 0)  # padding rows do not move
    tl.store(ints_ptr + POSITIONS * width + row, position + 1, mask=is_real)
    tl.store(ints_ptr + PREFIX * width + row, prefix + 1, mask=is_real)
    noise = tl.load(noise_ptr + row * 4 + 2, mask=inside, other=0)
    tl.store(noise_ptr + row * 4 + 2, noise + 1, mask=inside)
    has_next = inside & (row * 0 + step + 1 < max_steps)
    slot = tl.load(slots_ptr + row * max_steps + step + 1, mask=has_next, other=-1)
    tl.store(ints_ptr + SLOTS * width + row, slot, mask=inside)
    tl.store(step_ptr, step + 1)


class StaticBuffers:
    """The fixed memory that captured passes read and write."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        max_rows = SIZES[-1]
        self.ints = torch.zeros(len(FIELDS), max_rows, dtype=torch.int32, device=device)
        self.logit_rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self.inverse_temperature = torch.zeros(max_rows, dtype=torch.float64, device=device)
        self.noise = torch.zeros(max_rows, 4, dtype=torch.int64, device=device)
        self.slots = torch.full((max_rows, _MAX_STEPS), -1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows, _MAX_STEPS, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.visible = torch.full((_MIN_VISIBLE,), -1, dtype=torch.int32, device=device)


class TritonExecutor(TorchExecutor):
    """Runs passes of one network with the Triton kernels.

    Passes that can be captured are replayed. Outputs are
    views that the next pass overwrites. Not safe for concurrent use. Weights are packed once, by a
    pass of one row in the constructor. `cache_format` is the format of the fastest cache.

    Args:
        embedding: The token embedding `[vocab_size, hidden_size]`.
        vocab_size: Number of logits per row.
        layer: `layer(backend, x, index)`, one layer written against `Backend`.
        head: `head(backend, x)`, the final norm and the output projection.
        shapes: The attention of each layer.
        matrices: All weights of the network.
        embedding_scale: Factor of the embeddings.
        adapters: The loaded LoRA adapters.
        backend: The operations; None: a new `TritonBackend`.
        recorder: Captures launches; None: CUDA graphs on a GPU.
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
        self._plain_layer, self._plain_head = layer, head
        self._adapters = adapters
        dtype = torch.bfloat16 if all_take_bfloat16(list(matrices)) else torch.float32
        self.backend.product_dtype, self.cache_format = dtype, str(dtype).removeprefix("torch.")
        on_gpu = self.device.type == "cuda"
        self._recorder: Recorder = recorder or (CudaGraphs() if on_gpu else NoGraphs())
        self._buffers = StaticBuffers(vocab_size, self.device)
        self._graphs: dict[tuple[Any, ...], Launch] = {}
        self._cache: KeyValues | None = None
        self._pass: tuple[Rows, KeyValues] | None = None
        self._pack(shapes)

    @property
    def kernels(self) -> str:
        """A name of the code that computes the passes, and of the device."""
        return f"triton {triton.__version__}, {super().kernels}"

    @torch.no_grad()
    def _pack(self, shapes: Sequence[Attention]) -> None:
        """Run a pass of one row that stores nothing, which packs every weight as passes use it."""
        cache = self.new_cache(self.cache_format, 1, shapes)
        size = SIZES[0]
        rows = DeviceRows(self._buffers.ints[:, :size], self._buffers.visible)
        rows.slots.fill_(-1)
        self.backend.bind_device(rows, cache)
        self._forward(rows, 0, self._num_layers, None)
        self.backend.unbind()

    def regroup(
        self,
        layer: Callable[[Backend, Any, int], Any] | None,
        head: Callable[[Backend, Any], Any] | None = None,
    ) -> None:
        """Run `layer` and `head` in place of the network's own functions; None restores each."""
        self._layer, self._head = layer or self._plain_layer, head or self._plain_head

    def _forward(
        self, rows: DeviceRows, first: int, last: int, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        x: Any = self.backend.embed(rows.tokens, self._embedding, self._scale)
        for index in range(first, last):
            x = self._layer(self.backend, x, index)
        x = self.backend.force(x)
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        return self.backend.force(self._head(self.backend, x))

    # --- captured passes

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass, as a graph replay where it can be captured."""
        if not self._can_replay(rows, output_spec):
            return super().run(rows, cache, output_spec)
        size, num_logits = _size(len(rows)), _size(len(output_spec.logits))
        self._use(cache)
        self._load(rows, size)
        self._buffers.logit_rows[: len(output_spec.logits)].copy_(
            torch.from_numpy(output_spec.logits.astype(np.int64))
        )
        stop = int(rows.stop[0])
        key = (self._layer, self._head, size, num_logits, stop)
        if key in self._graphs:
            self._graphs[key]()
        else:
            self._graphs[key] = self._capture(lambda: self._run_logits(size, num_logits, stop))
        return Output(self._output(self._buffers.logits[: len(output_spec.logits)]), {})

    def _can_replay(self, rows: Rows, output_spec: OutputSpec) -> bool:
        count = len(rows)
        return (
            0 < count <= SIZES[-1]
            and 0 < len(output_spec.logits) <= count
            and not output_spec.hidden
            and not self.backend.has_routed
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
        ints, visible = layout(rows)
        padded = np.zeros((len(FIELDS), size), np.int32)
        padded[FIELDS.index("slots")] = -1
        padded[:, : len(rows)] = ints
        if len(visible) > len(self._buffers.visible):
            length = triton.next_power_of_2(len(visible))
            self._buffers.visible = torch.full((length,), -1, dtype=torch.int32, device=self.device)
            self._graphs.clear()
        if self.backend.grow_tables(int(rows.positions.max()) + _MAX_STEPS):
            self._graphs.clear()
        self._buffers.ints[:, :size].copy_(torch.from_numpy(padded))
        self._buffers.visible[: len(visible)].copy_(torch.from_numpy(visible))

    def _capture(self, run: Launch) -> Launch:
        self.backend.unbind()
        try:
            return self._recorder.capture(run)
        finally:
            self.backend.unbind()

    def _run_logits(self, size: int, num_logits: int, stop: int) -> None:
        """Compute the logits of the first `num_logits` `logit_rows`, within the fixed memory."""
        assert self._cache is not None
        rows = DeviceRows(self._buffers.ints[:, :size], self._buffers.visible)
        self.backend.bind_device(rows, self._cache)
        logits = self._forward(rows, 0, stop, self._buffers.logit_rows[:num_logits])
        self._buffers.logits[:num_logits].copy_(logits)

    # --- multi-step passes

    def multi_step(
        self, rows: Rows, cache: KeyValues, slots: np.ndarray, states: Sequence[SampleState]
    ) -> np.ndarray:
        """Sample several tokens of each row's sequence on the device.

        Args:
            rows: The last token of each sequence. Each attends to a table without a tail and is at
                position prefix - 1.
            cache: The key-value cache. The last sampled token is not stored in it.
            slots: int32 `[n, steps - 1]`, where all sampled tokens but the last are stored.
            states: How each sequence samples.

        Returns:
            The sampled tokens, int32 `[n, steps]`.

        Raises:
            InvalidRequestError: The rows are not as above, or there are too many steps.
            UnsupportedCombinationError: The pass cannot be captured.
        """
        count, steps = len(rows), slots.shape[1] + 1
        if (rows.tail_length != 0).any() or (rows.positions != rows.prefix - 1).any():
            raise InvalidRequestError(
                "rows of a multi-step pass must see all of their sequence and have no tail"
            )
        if steps > _MAX_STEPS or slots.shape[0] != count or len(states) != count:
            raise InvalidRequestError(
                f"slots have shape {slots.shape} and there are {len(states)} states; a multi-step"
                f" pass of {count} rows needs {count} of each, for at most {_MAX_STEPS} steps"
            )
        if not self._can_replay(rows, OutputSpec(np.arange(count, dtype=np.int32))):
            raise UnsupportedCombinationError(
                "these rows cannot run as a multi-step pass: their pass cannot be captured"
            )
        size, stop = _size(count), int(rows.stop[0])
        self._use(cache)
        self._load(_with_slots(rows, slots), size)
        self._load_states(rows, slots, states, size)
        key = (self._layer, self._head, size, -1, stop)
        if key not in self._graphs:
            # Capturing runs steps itself, so the rows are loaded again after it.
            self._graphs[key] = self._capture(lambda: self._step(size, stop))
            self._load(_with_slots(rows, slots), size)
            self._load_states(rows, slots, states, size)
        for _ in range(steps):
            self._graphs[key]()
        tokens: np.ndarray = self._buffers.tokens[:count, :steps].cpu().numpy()
        return tokens

    def _load_states(
        self, rows: Rows, slots: np.ndarray, states: Sequence[SampleState], size: int
    ) -> None:
        buffers, count = self._buffers, len(rows)
        step_slots = np.full((size, _MAX_STEPS), -1, np.int32)
        step_slots[:count, 1 : slots.shape[1] + 1] = slots
        noise = np.zeros((size, 4), np.int64)
        noise[:count, 0] = np.array([s.seed & (1 << 64) - 1 for s in states], np.uint64).view(
            np.int64
        )
        noise[:count, 1] = [s.stream for s in states]
        noise[:count, 2] = rows.positions + 1
        inverse_temperature = np.zeros(size, np.float64)
        inverse_temperature[:count] = [s.inverse_temperature for s in states]
        buffers.slots[:size].copy_(torch.from_numpy(step_slots))
        buffers.noise[:size].copy_(torch.from_numpy(noise))
        buffers.inverse_temperature[:size].copy_(torch.from_numpy(inverse_temperature))
        buffers.logit_rows[:size].copy_(torch.arange(size))
        buffers.step.zero_()

    def _step(self, size: int, stop: int) -> None:
        """Compute the logits of every row, sample, and replace the rows by the sampled tokens."""
        buffers = self._buffers
        self._run_logits(size, size, stop)
        sampled = sampling.gumbel(
            buffers.logits[:size], buffers.inverse_temperature[:size], buffers.noise[:size]
        )
        _advance_kernel[(1,)](
            sampled.contiguous(), buffers.ints, buffers.noise, buffers.slots, buffers.tokens,
            buffers.step, size, buffers.ints.shape[1], _MAX_STEPS, TOKENS=FIELDS.index("tokens"),
            POSITIONS=FIELDS.index("positions"), SLOTS=FIELDS.index("slots"),
            PREFIX=FIELDS.index("prefix"), BLOCK=SIZES[-1], **COMPILED,
        )  # fmt: skip

    # --- ranges of layers

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """Start a pass: the following `layers` calls belong to it."""
        self._pass = rows, cache

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """Scaled embeddings float32 `[m, hidden_size]` of int32 `tokens` `[m]`."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int32)).to(self.device)
        return self.backend.embed(ids, self._embedding, self._scale)

    def layers(self, x: torch.Tensor, active: np.ndarray, first: int, last: int) -> torch.Tensor:
        """Run layers [first, last) for the rows `active` of the pass.

        `x` and the result are hidden states float32 `[m, hidden_size]`.
        """
        if self._pass is None:
            raise RuntimeError("`layers` was called before `begin`")
        rows, cache = self._pass
        self.backend.bind(rows, active, cache, self._adapters)
        state: Any = x
        for index in range(first, last):
            state = self._layer(self.backend, state, index)
        return self.backend.force(state)

    def head(self, x: Any) -> torch.Tensor:
        """Logits float32 `[m, vocab_size]` of hidden states, through the final norm."""
        self.backend.unbind()
        x = as_tensor(x, self.device).float().contiguous()
        return self.backend.force(self._head(self.backend, x))


def _size(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def _with_slots(rows: Rows, slots: np.ndarray) -> Rows:
    """The rows, each with a table of its own that also lists the slots of the next tokens."""
    tables: list[np.ndarray] = []
    for row in range(len(rows)):
        table, prefix = rows.tables[rows.table[row]], int(rows.prefix[row])
        old = table[..., :prefix]
        new = np.broadcast_to(slots[row], (*old.shape[:-1], slots.shape[1]))
        tables.append(np.ascontiguousarray(np.concatenate((old, new), -1), np.int32))
    table_ids = np.arange(len(rows), dtype=np.int32)
    return Rows(
        rows.tokens, rows.positions, rows.slots, tables, table_ids, rows.prefix, rows.tails,
        rows.tail_start, rows.tail_length, rows.start, rows.stop,
    )  # fmt: skip
