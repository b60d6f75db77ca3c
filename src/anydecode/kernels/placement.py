"""Orders a program's steps, and assigns buffers to its values, and barriers where a thread reads
what another wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anydecode.kernels.library import Op
from anydecode.kernels.steps import NONE, Code, Step, Value

# Ops whose rows need no other row's results; in all others threads split columns or heads, or read
# what other rows have stored.
_BY_ROW = frozenset(Code) - {
    *(Code.LINEAR, Code.GROUPED_LINEAR, Code.ATTEND, Code.EXPERTS, Code.CONVOLVE, Code.SCAN),
    *(Code.SHIFT, Code.BLOCK_CONVOLVE, Code.INDEX, Code.POOL, Code.NGRAM),
}
# Ops that may overwrite their first input.
_IN_PLACE = frozenset(
    {
        *(Code.NORM, Code.ROPE, Code.GATED, Code.ADD, Code.SCALE, Code.SOFTCAP),
        *(Code.LAYER_NORM, Code.ACTIVATE, Code.ADD_POSITION, Code.GATE_PARTS, Code.CLAMP),
        *(Code.MULTIPLY, Code.CUT_OFF, Code.MATCH_MAGNITUDE, Code.SOFTMAX),
    }
)
# Ops that share memory outside the workspace: the states of split attention, and the scores and
# tables of selected positions.
_OF_ATTENTION = frozenset({Code.ATTEND, Code.MERGE, Code.INDEX, Code.SELECT})


def _uses(step: Step) -> list[tuple[Value | str, bool]]:
    """The values and other memory that a step accesses, and whether it writes them."""
    uses: list[tuple[Value | str, bool]] = [(value, False) for value in step.inputs]
    uses += [(value, True) for value in (step.output, step.scratch) if value is not None]
    if step.cache:
        uses.append(("cache", step.cache == "write"))
    if step.code in _OF_ATTENTION:
        uses.append(("attention", True))
    return uses


def _stages(steps: Sequence[Step], *, in_order: bool) -> list[int]:
    """The first stage in which each step can run, after the steps before it that it depends on.

    A stage ends where a thread needs what another has computed. `in_order`: no step runs in a stage
    before that of an earlier step.
    """
    stages: list[int] = []
    # By value or buffer: the last stages of steps that work by row and of others, first those that
    # read it, then those that write it.
    accessed: dict[Value | str | int, list[list[int]]] = {}
    for step in steps:
        is_by_row, stage = step.code in _BY_ROW, stages[-1] if in_order and stages else 0
        found = []
        for use, is_write in _uses(step):
            key: Value | str | int = use
            if isinstance(use, Value) and use.offset is not None and use.offset < 0:
                key = use.offset
            before = accessed.setdefault(key, [[-1, -1], [-1, -1]])
            found.append(before[is_write])
            for by_row, other in before if is_write else before[1:]:
                stage = max(stage, by_row + (not is_by_row), other + 1)
        for last in found:
            last[not is_by_row] = max(last[not is_by_row], stage)
        stages.append(stage)
    return stages


def arrange(steps: Sequence[Step]) -> list[Step]:
    """The steps in an order that needs the fewest stages: each in the first one that it can run in.

    Keys and values, for example, are computed beside the queries, not after their rotation.
    """
    stages = _stages(steps, in_order=False)
    return [steps[i] for i in sorted(range(len(steps)), key=stages.__getitem__)]


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


def place(steps: Sequence[Step], reserved: int) -> int:
    """Assign a buffer to every value that has none; return the floats per row in use, of which the
    first `reserved` are in use already.

    A buffer is used again from the next stage on: within a stage another thread may still read it.
    """
    last, stages = _last_uses(steps), _stages(steps, in_order=True)
    workspace, ended = _Workspace(), list[tuple[int, int]]()
    for index, step in enumerate(steps):
        if index and stages[index] > stages[index - 1]:
            for offset, width in ended:
                workspace.free(offset - reserved, width)
            ended = []
        if _can_overwrite(step, reserved) and last[step.inputs[0]] == index:
            assert step.output is not None
            step.output.offset = step.inputs[0].offset
        for value in (step.output, step.scratch):
            if value is not None and value.offset is None:
                value.offset = reserved + workspace.allocate(value.width)
        used = {v for v in (*step.inputs, step.output, step.scratch) if v is not None}
        kept = {value.offset for value in used if last[value] > index}
        for start, width in {(v.offset, v.width) for v in used if v.offset not in kept}:
            if start is not None and start >= reserved:
                ended.append((start, width))
    return reserved + workspace.size


def _can_overwrite(step: Step, reserved: int) -> bool:
    """Whether a step's output may have the buffer of its first input, if this is not read later."""
    if step.code not in _IN_PLACE or step.output is None or step.output.offset is not None:
        return False
    value = step.inputs[0]
    is_own = value.offset is not None and value.offset >= reserved
    return is_own and value.width == step.output.width


def assign_result(steps: list[Step], result: Value, target: int) -> None:
    """Let the step that computes `result` write to the buffer `target`, or append a copy to it."""
    last = _last_uses(steps)
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


_OTHER_MEMORY = {"cache": -9, "attention": -8}


@dataclass
class _Access:
    offset: int
    width: int
    is_by_row: bool
    is_write: bool


def _accesses(step: Step) -> list[_Access]:
    is_by_row = step.code in _BY_ROW
    accesses = []
    for use, is_write in _uses(step):
        if isinstance(use, Value):
            accesses.append(_Access(use.offset or 0, use.width, is_by_row, is_write))
        else:
            accesses.append(_Access(_OTHER_MEMORY[use], 1, is_by_row, is_write))
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
