"""Assigns buffers to a program's values, and barriers where a thread reads what another wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anydecode.kernels.library import Op
from anydecode.kernels.steps import NONE, Code, Step, Value

# Ops whose rows need no other row's results; in all others threads split columns or heads, or read
# what other rows have stored.
_BY_ROW = frozenset(Code) - {
    *(Code.LINEAR, Code.GROUPED_LINEAR, Code.ATTEND, Code.EXPERTS, Code.CONVOLVE, Code.SCAN),
    *(Code.SHIFT, Code.BLOCK_CONVOLVE, Code.INDEX, Code.POOL),
}
# Ops that may overwrite their first input.
_IN_PLACE = frozenset(
    {
        *(Code.NORM, Code.ROPE, Code.GATED, Code.ADD, Code.SCALE, Code.SOFTCAP),
        *(Code.LAYER_NORM, Code.ACTIVATE, Code.ADD_POSITION, Code.GATE_PARTS, Code.CLAMP),
        *(Code.MULTIPLY, Code.CUT_OFF, Code.MATCH_MAGNITUDE),
    }
)


def _last_uses(steps: Sequence[Step]) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in (*step.inputs, step.output, step.scratch):
            if value is not None:
                last[value] = index
    return last


class _Workspace:
    """Allocates ranges of floats per row, first fit."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        self.size = 0

    def allocate(self, width: int) -> int:
        width = -(-width // 16) * 16
        for index, (start, length) in enumerate(self._free):
            if length >= width:
                left = [(start + width, length - width)] if length > width else []
                self._free[index : index + 1] = left
                return start
        self.size += width
        return self.size - width

    def free(self, start: int, width: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (start, -(-width // 16) * 16)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


def assign_offsets(steps: list[Step], result: Value, target: int, reserved: int) -> int:
    """Assign a buffer to every value, and `target` to `result`; return the floats per row in use.

    The first `reserved` floats per row are in use already. Values that have an offset keep it.
    """
    _assign_result(steps, result, target, _last_uses(steps))
    return place(steps, reserved)


def place(steps: Sequence[Step], reserved: int) -> int:
    """Assign a buffer to every value that has none; return the floats per row in use, of which the
    first `reserved` are in use already."""
    last = _last_uses(steps)
    workspace = _Workspace()
    for index, step in enumerate(steps):
        for value in (step.output, step.scratch):
            if value is not None and value.offset is None:
                value.offset = reserved + workspace.allocate(value.width)
        for value in {*step.inputs, step.output, step.scratch}:
            if value is None or last.get(value) != index or value.offset is None:
                continue
            if value.offset >= reserved:
                workspace.free(value.offset - reserved, value.width)
    return reserved + workspace.size


def _assign_result(steps: list[Step], result: Value, target: int, last: dict[Value, int]) -> None:
    """Let the step that computes `result` write to `target`, or append a copy to it."""
    producer = next(
        (s for s in reversed(steps) if s.output is result and s.code != Code.LORA), None
    )
    if producer is not None and result.offset is None:
        index = steps.index(producer)
        current = [v for v in last if v.offset == target]
        in_place = producer.code in _IN_PLACE
        if all(last[v] < index or (last[v] == index and in_place) for v in current):
            result.offset = target
            return
    fields = {"width": result.width, "width_out": result.width}
    steps.append(Step(Code.COPY, (result,), Value(result.width, target), fields))


@dataclass
class _Access:
    offset: int
    width: int
    is_by_row: bool
    is_write: bool


def _accesses(step: Step) -> list[_Access]:
    is_by_row = step.code in _BY_ROW
    accesses = [_Access(v.offset or 0, v.width, is_by_row, False) for v in step.inputs]
    for value in (step.output, step.scratch):
        if value is not None:
            accesses.append(_Access(value.offset or 0, value.width, is_by_row, True))
    if step.cache:
        accesses.append(_Access(-9, 1, is_by_row, step.cache == "write"))
    return accesses


def _conflict(one: _Access, other: _Access) -> bool:
    if not (one.is_write or other.is_write):
        return False
    same = (one.offset, one.width) == (other.offset, other.width)
    if same or one.offset < 0 or other.offset < 0:
        return one.offset == other.offset and not (one.is_by_row and other.is_by_row)
    return one.offset < other.offset + other.width and other.offset < one.offset + one.width


def to_ops(steps: Sequence[Step]) -> list[Op]:
    """The C structs of steps with assigned buffers, with the barriers that they need."""
    ops: list[Op] = []
    pending: list[_Access] = []
    for step in steps:
        accesses = _accesses(step)
        barrier = any(_conflict(a, b) for a in accesses for b in pending)
        pending = accesses if barrier else pending + accesses
        offsets = [v.offset for v in step.inputs] + [NONE, NONE]
        a, b = offsets[:2]
        op = Op(code=int(step.code), barrier=int(barrier), a=a, b=b, **step.fields)
        op.c = NONE if step.scratch is None else step.scratch.offset
        op.out = NONE if step.output is None else step.output.offset
        ops.append(op)
    return ops
