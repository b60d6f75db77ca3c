"""Recurrent states of a key-value cache, and the order in which a pass advances them.

A recurrent layer stores its inputs (the channels of the convolution and the gates) per slot, as
attention stores keys and values. So every state can be computed again from the slots of its
prefix, one position after the other. The states after some slots are kept, and a row starts from
the nearest one before it. A kept state has the bits of the one that would be computed again,
because there is only one order of operations; which states are kept changes the speed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import Recurrence, Rows
from anydecode.kernels.mapped import mapped_zeros

#: The size of the states that a cache keeps, in bytes; memory is occupied from the first use.
STATE_BYTES = 1 << 30
#: States after every so many positions of a prompt are kept for requests that share the prefix.
INTERVAL = 256
_NO_STATE = -1, 0  # a state and its number of layers
# Longer chains are parts of prompts. A shorter one may be a draft, which is removed from its second
# row on if it is rejected.
_MAX_DRAFT = 32


#: The states that a scan keeps for branches. The largest branch of a node is the last one, so that
#: a tree of n nodes needs log2(n) of them.
MAX_BRANCH_STATES = 16


def branch_state(number: int) -> int:
    """The state in `Scan.start` and `Scan.saves` that is kept during the scan alone."""
    return -2 - number


def check_rows(rows: Rows, has_states: bool) -> None:
    """Check that each row sees every earlier position and itself, as a recurrence needs.

    Args:
        rows: The rows of a pass.
        has_states: Whether a recurrence has a state. If all are convolutions alone, a row may see
            later positions too, which no convolution reads.

    Raises:
        UnsupportedCombinationError: A row does not.
    """
    prefix, tails = rows.prefix, rows.tail_length
    is_last = prefix + tails == rows.positions + 1
    if not has_states:
        is_last |= (tails == 0) & (prefix > rows.positions)
    is_valid = bool(is_last.all() and (rows.slots >= 0).all())
    for number, table in enumerate(rows.tables):
        own = rows.table == number
        longest = int(prefix[own].max(initial=0))
        is_valid = is_valid and table.ndim == 1 and bool((table[:longest] >= 0).all())
        ends = own & (tails == 0)
        is_valid = is_valid and bool((table[rows.positions[ends]] == rows.slots[ends]).all())
    has_tail = tails > 0
    if is_valid and has_tail.any():
        last = rows.tails[rows.tail_start[has_tail] + tails[has_tail] - 1]
        is_valid = bool((rows.tails >= 0).all() and (last == rows.slots[has_tail]).all())
    if not is_valid:
        raise UnsupportedCombinationError(
            "a layer that is recurrent, or has entries of several positions, needs the inputs of"
            " every earlier position: methods that evict, skip or merge positions, or see later"
            " ones, do not work with this model"
        )


def path_slots(rows: Rows, row: int) -> np.ndarray:
    """The slots of all positions up to that of a row, int32 `[position + 1]`."""
    table, start = rows.tables[rows.table[row]], int(rows.tail_start[row])
    slots = table[: rows.prefix[row]]
    count = int(rows.tail_length[row])
    return np.concatenate([slots, rows.tails[start : start + count]]) if count else slots


def windows(rows: Rows, index: np.ndarray, size: int) -> np.ndarray:
    """The slots of the last `size` positions of the rows `index`, up to their own, int64 `[rows,
    size]`; -1 before the first position."""
    found = np.full((len(index), size), -1, np.int64)
    for i, row in enumerate(index):
        slots = path_slots(rows, row)[: rows.positions[row] + 1][-size:]
        found[i, size - len(slots) :] = slots
    return found


@dataclass(eq=False)
class Scan:
    """The steps that compute the states of some rows, in runs of consecutive positions.

    Each position is one step, however many rows of a tree follow it. Run i starts from the state
    `start[i]` (-1: zeros). Its slots are `slots[first[i] : first[i + 1]]`: `lead` slots before its
    first step (-1 before the first position), then that of each step. `rows` and `saves` are
    parallel to `slots`: the row that a step computes (-1: none, its position was computed before),
    and the state that receives the result (-1: none). A state that is only kept for the branches of
    a tree in this scan, number b, is `branch_state(b)`. Runs are in order: a run may start from a
    state that an earlier one has saved. All arrays are int32.
    """

    lead: int
    start: np.ndarray
    first: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    saves: np.ndarray


class StatePool:
    """The recurrent states after some slots of a cache.

    Args:
        shapes: The recurrence of each layer that has one.
        max_states: The largest number of states; None: as many as `STATE_BYTES` hold.
        interval: See `INTERVAL`.

    Attributes:
        arrays: Per recurrent layer with a state, float32 `[max_states, num_heads, head_dim,
            state_size]`.
    """

    def __init__(
        self,
        shapes: Mapping[int, Recurrence],
        max_states: int | None = None,
        interval: int = INTERVAL,
    ) -> None:
        self.lead = max(shape.window for shape in shapes.values()) - 1
        sizes = {layer: s.state_shape for layer, s in shapes.items() if s.state_shape}
        num_bytes = sum(4 * int(np.prod(size)) for size in sizes.values())
        self.max_states = max_states or max(4, STATE_BYTES // max(1, num_bytes))
        self.interval = interval
        self.num_layers = 1 + max(shapes)  # up to the last one with a recurrence
        self.arrays = {
            layer: mapped_zeros((self.max_states, *size), np.dtype(np.float32))
            for layer, size in sizes.items()
        }
        self._free = list(range(self.max_states - 1, -1, -1))
        self._state_of: dict[int, int] = {}  # slot -> state, the least recently used first
        self._depth_of: dict[int, int] = {}  # slot -> the number of layers that the state is of
        self._shared: set[int] = set()  # slots whose states are kept for other requests
        self._superseded: dict[int, None] = {}  # slots whose states a later one has replaced
        self._lock = threading.Lock()  # slots may be freed while a pass runs

    @property
    def num_states(self) -> int:
        """The number of states that are kept."""
        return len(self._state_of)

    def forget(self, slots: np.ndarray) -> None:
        """Drop the states after slots that have been freed or are written again."""
        with self._lock:
            for slot in slots.tolist():
                self._drop(slot)

    def begin(self, rows: Rows) -> PassStates:
        """Choose the states that a pass, whose rows `check_rows` accepts, starts from and keeps."""
        with self._lock:
            return PassStates(self, rows)

    def move(self, state: int, slot: int) -> None:
        """Make a state the one after `slot`, after further steps."""
        with self._lock:
            before = next((s for s, index in self._state_of.items() if index == state), None)
            if before is not None:
                self._shared.discard(before)
                self._superseded.pop(before, None)
                del self._state_of[before]
                self._state_of[slot] = state
                self._depth_of[slot] = self._depth_of.pop(before)

    def _drop(self, slot: int) -> None:
        state = self._state_of.pop(slot, None)
        if state is not None:
            self._free.append(state)
            del self._depth_of[slot]
            self._shared.discard(slot)
            self._superseded.pop(slot, None)

    def _allocate(self, slot: int, pinned: set[int]) -> int:
        """A state for the one after `slot`, of a slot that is not `pinned`; -1 if there is none."""
        unused = next((s for s in self._superseded if s not in pinned), None)
        if unused is None and not self._free:
            candidates = [s for s in self._state_of if s not in pinned]
            unused = next((s for s in candidates if s not in self._shared), None)
            unused = candidates[0] if unused is None and candidates else unused
        if unused is not None:
            self._drop(unused)
        if not self._free:
            return -1
        self._state_of[slot] = state = self._free.pop()
        return state


class PassStates:
    """The states of one pass, and its steps in any range of layers."""

    def __init__(self, pool: StatePool, rows: Rows) -> None:
        self._pool, self._rows = pool, rows
        # Layers without a recurrence after the last one with it do not matter for states.
        self._stop = np.minimum(rows.stop, pool.num_layers)
        self._paths = [path_slots(rows, row) for row in range(len(rows))]
        self._saves: dict[int, int] = {}  # row -> state
        for slot in rows.slots[rows.start == 0].tolist():
            pool._drop(slot)
        self._before = {s: (state, pool._depth_of[s]) for s, state in pool._state_of.items()}
        self._all_steps = self._first_steps(range(len(rows)))
        runs = self._runs(self._all_steps)
        starts = {run.origin for run in runs if run.origin is not None}
        self._before = {slot: self._before[slot] for slot in starts}
        # States that rows which go on from an earlier layer complete.
        pinned = starts | set(rows.slots[rows.start > 0].tolist())
        for run in runs:
            self._save(run, pinned)

    def scan(self, active: np.ndarray) -> Scan:
        """The steps for the rows `active`, which are in the order of the pass."""
        lead = self._pool.lead
        start, first = [], [0]
        slots: list[np.ndarray] = []
        row_parts: list[np.ndarray] = []
        saves: list[np.ndarray] = []
        is_all = len(active) == len(self._rows)
        for run in self._runs(self._all_steps if is_all else self._first_steps(active)):
            path, count = self._paths[run.rows[-1]], len(run.members)
            begin = run.begin - lead
            part = path[max(0, begin) : run.begin + count]
            slots += [np.full(max(0, -begin), -1, np.int32), part]
            size = max(0, -begin) + len(part)
            row_parts += [np.full(size - count, -1, np.int32), np.array(run.members, np.int32)]
            saves += [np.full(size - count, -1, np.int32), np.array(run.saves, np.int32)]
            start.append(run.start)
            first.append(first[-1] + size)
        arrays = (np.concatenate(x).astype(np.int32) for x in (slots, row_parts, saves))
        return Scan(lead, np.array(start, np.int32), np.array(first, np.int32), *arrays)

    @property
    def last_state(self) -> int:
        """The state that the last row saves, or -1."""
        return self._saves.get(len(self._rows) - 1, -1)

    @property
    def max_steps(self) -> int:
        """The largest number of steps of a multi-step pass: its steps replace the state of the last
        row, and a state at a multiple of the interval is kept for other requests."""
        left = self._pool.interval - 1 - int(self._rows.positions[-1]) % self._pool.interval
        return max(1, left) if self.last_state >= 0 else 1

    def _runs(self, first_steps: list[_Step]) -> list[_Run]:
        """The runs of all steps, depth first, the largest branch of a step last."""
        runs: list[_Run] = []
        free: list[int] = []  # states of branches that have ended
        num_branches = 0
        waiting = [(step, step.start, False) for step in reversed(first_steps)]
        while waiting:
            step, start, is_last = waiting.pop()
            if is_last and start < -1:
                free.append(start)
            run = _Run(step.position, start, step.origin)
            runs.append(run)
            while True:
                save = self._saves.get(step.row, -1)
                if len(step.next) > 1:
                    step.next.sort(key=lambda branch: branch.size)
                    if save < 0:
                        if not free:
                            assert num_branches < MAX_BRANCH_STATES, "2 ** 16 nodes at most"
                            free.append(branch_state(num_branches))
                            num_branches += 1
                        save = free.pop()
                    last = step.next[-1]
                    waiting += [(x, save, x is last) for x in reversed(step.next[1:])]
                run.add(step.row, step.member, save)
                if not step.next:
                    break
                step = step.next[0]
        return runs

    def _first_steps(self, active: Sequence[int] | np.ndarray) -> list[_Step]:
        """The steps that start from a state known before the pass, with all that follow them."""
        steps: list[_Step] = []
        by_slot: dict[int, _Step] = {}
        for member, row in enumerate(active):
            path, stop = self._paths[row], self._stop[row]
            last = by_slot.get(int(path[-1]))
            if last is None or last.row >= 0:  # else a step towards an earlier row
                begin, parent, state = len(path) - 1, None, -1
                while begin:
                    slot = int(path[begin - 1])
                    parent = by_slot.get(slot)
                    state, depth = self._before.get(slot, _NO_STATE)
                    state = state if depth >= stop else -1
                    if parent is not None or state >= 0:
                        break
                    begin -= 1
                origin = int(path[begin - 1]) if begin and parent is None else None
                for position in range(begin, len(path)):
                    parent = _Step(position, parent, state, origin)
                    by_slot[int(path[position])] = parent
                    steps.append(parent)
                last = parent
            assert last is not None, "a path has at least one position"
            last.row, last.member = int(row), member
        for step in reversed(steps):
            if step.parent is not None:
                step.parent.size += step.size
        return [step for step in steps if step.parent is None]

    def _can_save(self, row: int) -> bool:
        """Whether a row is no node of a tree, and runs from layer 0, or on from the layer that the
        state of its slot has reached."""
        rows = self._rows
        depth = self._pool._depth_of.get(int(rows.slots[row]), 0)
        return rows.tail_length[row] == 0 and rows.start[row] == depth

    def _save(self, run: _Run, pinned: set[int]) -> None:
        """Choose the rows of a run whose states are kept: the last one, those at multiples of the
        interval and, of a chain that may be a draft, the first."""
        pool, rows = self._pool, [row for row in run.rows if self._can_save(row)]
        if not rows:
            return
        self._supersede(run)
        chosen = {rows[-1]} | ({rows[0]} if 1 < len(rows) <= _MAX_DRAFT else set())
        for row in rows:
            path = self._paths[row]
            is_shared = len(path) % pool.interval == 0
            if row in chosen or is_shared:
                slot = int(path[-1])
                pinned.add(slot)
                state = pool._state_of.get(slot, -1)
                state = pool._allocate(slot, pinned) if state < 0 else state
                if state >= 0:
                    self._saves[row] = state
                    pool._depth_of[slot] = int(self._stop[row])
                    if is_shared:
                        pool._shared.add(slot)

    def _supersede(self, run: _Run) -> None:
        """Mark the states before a run that only a rejected draft or a fork would use again, and
        the one that it starts from as used."""
        pool, path, depth = self._pool, self._paths[run.rows[0]], self._stop[run.rows[0]]
        for slot in path[max(0, run.begin - _MAX_DRAFT) : run.begin].tolist():
            if pool._depth_of.get(slot, depth + 1) <= depth and slot not in pool._shared:
                pool._superseded[slot] = None
        if run.begin:
            slot = int(path[run.begin - 1])
            if slot in pool._state_of:
                pool._state_of[slot] = pool._state_of.pop(slot)


class _Step:
    """A position that a scan computes, and those that follow it. Without a parent, it starts from
    the state `start`, that of the slot `origin` if it has one."""

    __slots__ = ("member", "next", "origin", "parent", "position", "row", "size", "start")

    def __init__(self, position: int, parent: _Step | None, start: int, origin: int | None) -> None:
        self.position, self.parent = position, parent
        self.start, self.origin = start, origin
        self.row = self.member = -1  # the row of the pass, and its index among the active ones
        self.next: list[_Step] = []
        self.size = 1  # steps of the branch that begins here
        if parent is not None:
            parent.next.append(self)


class _Run:
    """Steps of consecutive positions from `begin` on. `start` is the state before them, `origin`
    its slot if it was known before the pass. `rows` are the rows of the pass among the steps;
    `members`, their indices among the active rows, and `saves` have an entry per step."""

    def __init__(self, begin: int, start: int, origin: int | None) -> None:
        self.begin, self.start, self.origin = begin, start, origin
        self.rows: list[int] = []
        self.members: list[int] = []
        self.saves: list[int] = []

    def add(self, row: int, member: int, save: int) -> None:
        self.members.append(member)
        self.saves.append(save)
        if row >= 0:
            self.rows.append(row)
