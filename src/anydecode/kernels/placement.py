"""Gives a program's values their buffers, and puts barriers only where one thread reads what
another wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anydecode.kernels.library import Op
from anydecode.kernels.steps import NONE, Code, Step, Value

# Ops of which a thread does the rows it owns; in all others threads split columns or heads.
_BY_ROW = frozenset(Code) - {Code.LINEAR, Code.ATTEND, Code.EXPERTS}
# Ops that may write over their first input.
_IN_PLACE = frozenset({Code.NORM, Code.ROPE, Code.GATED, Code.ADD, Code.SCALE, Code.SOFTCAP})


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
