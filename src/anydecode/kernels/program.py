"""Records a network as a program: ops in C structs, with row buffers shared by liveness and
barriers only where one thread reads what another wrote."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from anydecode.kernels.interface import Attention, Backend, Rope, Weight
from anydecode.kernels.library import Matrix, Op
from anydecode.kernels.packing import Packer, float_vector

Code = IntEnum(
    "Code",
    "EMBED TAP GATHER NORM QUANTISE LINEAR LORA ROPE_TABLE ROPE STORE ATTEND GATED ADD SCALE"
    " SOFTCAP COPY EXPERTS",
    start=0,
)

#: Places outside the workspace.
STREAM, LOGITS, NONE = -1, -2, -3

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_BLOCK_FLOATS = 12  # one block of 32 quantised activations takes 48 bytes
_FLOAT_FORMATS = ("F32", "F16", "BF16")

# Ops of which a thread does the rows it owns; in all others threads split columns or heads.
_BY_ROW = frozenset(Code) - {Code.LINEAR, Code.ATTEND, Code.EXPERTS}
# Ops that may write over their first input.
_IN_PLACE = frozenset({Code.NORM, Code.ROPE, Code.GATED, Code.ADD, Code.SCALE, Code.SOFTCAP})


@dataclass(eq=False)
class Value:
    """A matrix with one row of `width` floats per row of the pass."""

    width: int
    place: int | None = None


@dataclass(eq=False)
class Step:
    """An op before its buffers are placed. `fields` are those of the C struct."""

    code: Code
    inputs: tuple[Value, ...]
    output: Value | None
    fields: dict[str, Any] = field(default_factory=dict)
    scratch: Value | None = None
    cache: str = ""  # "write" or "read": what it does to the keys and values


class NativeBackend(Backend):
    """Records what a network does. Values are symbols; nothing is computed."""

    name = "native"

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self.steps: list[Step] = []
        self.tables: dict[Rope, Value] = {}
        self.targets: dict[str, int] = {}
        self.kept: list[Any] = []  # what the ops point to
        self.shapes: list[Attention] = []
        self._quantised: dict[Value, Value] = {}

    def begin(self) -> None:
        """Start a new stretch of steps: nothing is carried over but the rotary tables."""
        self.steps = []
        self._quantised = {}

    def _record(self, code: Code, inputs: tuple[Value, ...], width: int, **fields: Any) -> Value:
        out = Value(width)
        fields = {"width": inputs[0].width, "width_out": width, **fields}
        self.steps.append(Step(code, inputs, out, fields))
        return out

    def _keep(self, tensor: torch.Tensor) -> int:
        vector = float_vector(tensor)
        self.kept.append(vector)
        return vector.data_ptr()

    def _input(self, x: Value, format: str) -> Value:
        """x as a product with a weight of this format takes it."""
        if format in _FLOAT_FORMATS:
            return x
        if x not in self._quantised:
            width = x.width // 32 * _BLOCK_FLOATS
            self._quantised[x] = self._record(Code.QUANTISE, (x,), width)
        return self._quantised[x]

    def rms_norm(self, x: Value, weight: torch.Tensor | None, eps: float, groups: int = 1) -> Value:
        fields: dict[str, Any] = {"groups": groups, "x": eps}
        if weight is not None:
            fields |= {"weight": self._keep(weight), "count": weight.numel()}
        return self._record(Code.NORM, (x,), x.width, **fields)

    def linear(self, x: Value, weight: Weight, bias: torch.Tensor | None = None) -> Value:
        matrix = self._packer.pack(weight)
        fields: dict[str, Any] = {"matrix": ctypes.addressof(matrix)}
        if bias is not None:
            fields["weight"] = self._keep(bias)
        y = self._record(
            Code.LINEAR, (self._input(x, weight.format),), weight.out_features, **fields
        )
        if weight.name in self.targets:
            step = Step(Code.LORA, (x, y), y, {"count": self.targets[weight.name]})
            step.fields |= {"width": x.width, "width_out": y.width}
            self.steps.append(step)
        return y

    def rope(self, x: Value, num_heads: int, rope: Rope) -> Value:
        half = rope.frequencies.numel()
        table = self.tables.setdefault(rope, Value(2 * half))
        fields = {"heads": num_heads, "head_dim": x.width // num_heads, "count": half}
        return self._record(Code.ROPE, (x, table), x.width, **fields)

    def attention(self, q: Value, k: Value, v: Value, layer: int, shape: Attention) -> Value:
        fields = {"layer": layer, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads}
        fields["head_dim"] = shape.head_dim
        store = Step(Code.STORE, (k, v), None, {**fields, "width": k.width}, cache="write")
        self.steps.append(store)
        self.shapes.append(shape)
        limits = {"window": shape.window or 0, "x": shape.scale, "y": shape.softcap or 0.0}
        out = self._record(Code.ATTEND, (q,), q.width, **fields, **limits)
        self.steps[-1].cache = "read"
        return out

    def gated(self, gate: Value, up: Value, activation: str) -> Value:
        return self._record(Code.GATED, (gate, up), gate.width, activation=_ACTIVATIONS[activation])

    def add(self, x: Value, y: Value) -> Value:
        return self._record(Code.ADD, (x, y), x.width)

    def scale(self, x: Value, factor: float) -> Value:
        return self._record(Code.SCALE, (x,), x.width, x=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._record(Code.SOFTCAP, (x,), x.width, x=cap)

    def experts(
        self,
        x: Value,
        router: Value,
        gate: list[Weight],
        up: list[Weight],
        down: list[Weight],
        top_k: int,
        normalise: bool,
        activation: str,
    ) -> Value:
        matrices = [self._packer.pack(weight) for weight in (*gate, *up, *down)]
        pointers = (ctypes.c_void_p * len(matrices))(*map(ctypes.addressof, matrices))
        self.kept.append(pointers)
        inner, width_out = gate[0].out_features, down[0].out_features
        quantised = max(x.width, inner) // 32 * _BLOCK_FLOATS
        per_slot = 4 + x.width + 2 * inner + width_out + quantised
        fields = {"groups": top_k, "count": len(gate), "kv_heads": int(normalise)}
        fields |= {"activation": _ACTIVATIONS[activation], "experts": ctypes.addressof(pointers)}
        out = self._record(Code.EXPERTS, (x, router), width_out, **fields)
        self.steps[-1].scratch = Value(top_k * per_slot + len(gate) + 16)
        return out


def _last_uses(steps: Sequence[Step]) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in (*step.inputs, step.output, step.scratch):
            if value is not None:
                last[value] = index
    return last


class _Room:
    """Places values in the fewest floats per row, first fit."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        self.size = 0

    def take(self, width: int) -> int:
        width = -(-width // 16) * 16
        for index, (start, length) in enumerate(self._free):
            if length >= width:
                left = [(start + width, length - width)] if length > width else []
                self._free[index : index + 1] = left
                return start
        self.size += width
        return self.size - width

    def give(self, start: int, width: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (start, -(-width // 16) * 16)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


def place(steps: list[Step], result: Value, target: int, pinned: int) -> int:
    """Give every value its buffer, `result` the place `target`; the floats per row now needed.

    `pinned` floats per row are taken already. Values that have a place keep it.
    """
    last = _last_uses(steps)
    _place_result(steps, result, target, last)
    room = _Room()
    for index, step in enumerate(steps):
        for value in (step.output, step.scratch):
            if value is not None and value.place is None:
                value.place = pinned + room.take(value.width)
        for value in {*step.inputs, step.output, step.scratch}:
            if value is None or last.get(value) != index or value.place is None:
                continue
            if value.place >= pinned:
                room.give(value.place - pinned, value.width)
    return pinned + room.size


def _place_result(steps: list[Step], result: Value, target: int, last: dict[Value, int]) -> None:
    """Let the last step write `target` directly, or copy the result there."""
    maker = next((s for s in reversed(steps) if s.output is result and s.code != Code.LORA), None)
    if maker is not None and result.place is None:
        at = steps.index(maker)
        old = [v for v in last if v.place == target]
        free = all(last[v] < at or (last[v] == at and maker.code in _IN_PLACE) for v in old)
        if free:
            result.place = target
            return
    fields = {"width": result.width, "width_out": result.width}
    steps.append(Step(Code.COPY, (result,), Value(result.width, target), fields))
    last[result] = len(steps) - 1


@dataclass
class _Access:
    place: int
    width: int
    by_row: bool
    write: bool


def _accesses(step: Step) -> list[_Access]:
    by_row = step.code in _BY_ROW
    found = [_Access(v.place or 0, v.width, by_row, False) for v in step.inputs]
    for value in (step.output, step.scratch):
        if value is not None:
            found.append(_Access(value.place or 0, value.width, by_row, True))
    if step.cache:
        found.append(_Access(-9, 1, by_row, step.cache == "write"))
    return found


def _conflict(one: _Access, other: _Access) -> bool:
    if not (one.write or other.write):
        return False
    same = (one.place, one.width) == (other.place, other.width)
    if same or one.place < 0 or other.place < 0:
        return one.place == other.place and not (one.by_row and other.by_row)
    return one.place < other.place + other.width and other.place < one.place + one.width


def to_ops(steps: Sequence[Step]) -> list[Op]:
    """The C structs of placed steps, with barriers where threads meet."""
    ops: list[Op] = []
    since: list[_Access] = []
    for step in steps:
        mine = _accesses(step)
        barrier = any(_conflict(a, b) for a in mine for b in since)
        since = mine if barrier else since + mine
        places = [v.place for v in step.inputs] + [NONE, NONE]
        op = Op(code=int(step.code), barrier=int(barrier), a=places[0], b=places[1], **step.fields)
        op.c = NONE if step.scratch is None else step.scratch.place
        op.out = NONE if step.output is None else step.output.place
        ops.append(op)
    return ops


@dataclass(eq=False)
class Program:
    """Ops in one array: prologue, then layers, then head. `starts[l]` is the first op of layer l,
    which copies the state after l layers to whoever wants it."""

    ops: Any
    num_ops: int
    num_prologue: int
    starts: list[int]
    head: int
    body_floats: int
    head_floats: int
    shapes: list[Attention]
    embedding: Matrix
    targets: dict[str, int]
    kept: list[Any]


def record(
    packer: Packer,
    embedding: Weight,
    embedding_scale: float,
    num_layers: int,
    layer: Callable[[Backend, Any, int], Any],
    head: Callable[[Backend, Any], Any],
    targets: dict[str, int],
) -> Program:
    """The program of a network whose `layer` and `head` are written against `Backend`.

    `targets` numbers the matrices that adapters change.
    """
    backend = NativeBackend(packer)
    backend.targets = targets
    width = embedding.in_features
    matrix = packer.pack(embedding)
    stretches: list[tuple[list[Step], Value]] = []
    for index in range(num_layers):
        backend.begin()
        result = layer(backend, Value(width, STREAM), index)
        stretches.append((backend.steps, result))
    backend.begin()
    rows = Value(width)
    backend.steps.append(Step(Code.GATHER, (Value(width, STREAM),), rows, {"width": width}))
    logits = head(backend, rows)
    prologue, pinned = _prologue(backend, matrix, embedding_scale, width)
    steps, body, starts = list(prologue), pinned, []
    for index, (stretch, result) in enumerate(stretches):
        starts.append(len(steps))
        body = max(body, place(stretch, result, STREAM, pinned))
        steps += [_tap(index, width), *stretch]
    starts.append(len(steps))
    steps.append(_tap(num_layers, width))
    head_floats = place(backend.steps, logits, LOGITS, 0)
    ops = to_ops(steps) + to_ops(backend.steps)
    array = (Op * len(ops))(*ops)
    return Program(
        array, len(ops), len(prologue), starts, len(steps), body, head_floats, backend.shapes,
        matrix, targets, backend.kept,
    )  # fmt: skip


def _tap(layer: int, width: int) -> Step:
    return Step(Code.TAP, (Value(width, STREAM),), None, {"layer": layer, "width": width})


def _prologue(
    backend: NativeBackend, matrix: Matrix, scale: float, width: int
) -> tuple[list[Step], int]:
    """The embedding and the rotary tables, and the floats per row that stay taken."""
    fields = {"width": width, "matrix": ctypes.addressof(matrix), "x": scale}
    steps, pinned = [Step(Code.EMBED, (), Value(width, STREAM), fields)], 0
    for rope, table in backend.tables.items():
        table.place = pinned
        pinned += -(-table.width // 16) * 16
        fields = {"count": table.width // 2, "x": rope.factor}
        fields["weight"] = backend._keep(rope.frequencies)
        steps.append(Step(Code.ROPE_TABLE, (), table, fields))
    return steps, pinned
