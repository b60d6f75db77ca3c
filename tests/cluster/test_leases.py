"""Leases: every sequence of steps frees all blocks, and none twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anydecode.cluster.leases import Key, LeaseEnd, LeaseState, LeaseTable

KEYS = st.tuples(st.integers(0, 2), st.integers(0, 1))
HOLDERS = st.sampled_from(["a", "b"])


class Leases(RuleBasedStateMachine):
    """A table of at most 100 bytes, and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable(max_bytes=100, seconds=10.0)
        self.open: dict[Key, tuple[int, float, str]] = {}
        self.num_offered = self.num_ended = 0

    @rule(key=KEYS, size=st.integers(0, 120))
    def offer(self, key: Key, size: int) -> None:
        used = sum(size for size, _, _ in self.open.values())
        can = key not in self.open and used + size <= 100
        assert self.table.offer(key, size, self.now) is can
        if can:
            self.num_offered += 1
            self.open[key] = (size, self.now + 10.0, "")

    @rule(key=KEYS, holder=HOLDERS)
    def reserve(self, key: Key, holder: str) -> None:
        self._expire()
        can = key in self.open and self.open[key][2] in ("", holder)
        assert self.table.reserve(key, holder, self.now) is can
        if can:
            self.open[key] = (self.open[key][0], self.now + 10.0, holder)

    @rule(key=KEYS, holder=HOLDERS)
    def pull(self, key: Key, holder: str) -> None:
        state = self.table.state(key)
        self._expire()
        is_reserved = state in (LeaseState.RESERVED, LeaseState.PULLING)
        can = is_reserved and key in self.open and self.open[key][2] == holder
        assert self.table.pull(key, holder, self.now) is can
        if can:
            self.open[key] = (self.open[key][0], self.now + 10.0, holder)
            assert self.table.state(key) is LeaseState.PULLING

    @rule(key=KEYS, holder=HOLDERS)
    def acknowledge(self, key: Key, holder: str) -> None:
        self.table.acknowledge(key, holder)
        if key in self.open and self.open[key][2] == holder:
            del self.open[key]

    @rule(key=KEYS)
    def cancel(self, key: Key) -> None:
        self.table.cancel(key)
        self.open.pop(key, None)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        self._expire()

    @rule()
    def free(self) -> None:
        self.num_ended += len(self.table.ended)
        self.table.ended.clear()

    @invariant()
    def holds_what_is_open(self) -> None:
        self._expire()
        self.table.expire(self.now)
        assert sorted(self.table.keys) == sorted(self.open)
        assert self.table.num_bytes == sum(size for size, _, _ in self.open.values())
        assert self.num_offered == self.num_ended + len(self.table.ended) + len(self.table)

    def teardown(self) -> None:
        self.wait(11.0)
        self.free()
        assert len(self.table) == 0 and self.num_offered == self.num_ended

    def _expire(self) -> None:
        self.open = {key: one for key, one in self.open.items() if one[1] > self.now}


TestLeases = Leases.TestCase


def test_a_lease_ends_once_and_says_how() -> None:
    table = LeaseTable(seconds=10.0)
    for number in range(3):
        assert table.offer((number, 0), 1, 0.0)
    table.reserve((0, 0), "a", 1.0)
    table.acknowledge((0, 0), "a")
    table.acknowledge((0, 0), "a")
    table.cancel((1, 0))
    table.expire(20.0)
    ends = [LeaseEnd.ACKNOWLEDGED, LeaseEnd.CANCELLED, LeaseEnd.EXPIRED]
    assert table.ended == [((number, 0), end) for number, end in enumerate(ends)]
