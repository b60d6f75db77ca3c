"""What a worker keeps for another one: the blocks of a prompt that it has computed, each set under
a lease.

A lease is offered, reserved by one worker, pulled by it and acknowledged. It ends with the
acknowledgement, when it is cancelled, or at its deadline; its blocks are freed then. Nothing else
frees them, and every step may come twice, late or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

#: (number of the task, attempt).
Key = tuple[int, int]

#: How long a lease lasts without a further step, in seconds.
LEASE_SECONDS = 20.0
#: Maximum size of the blocks under leases, in bytes.
MAX_LEASED_BYTES = 1 << 30


class LeaseState(Enum):
    """The states of a lease that holds blocks."""

    OFFERED = auto()
    RESERVED = auto()
    PULLING = auto()


class LeaseEnd(Enum):
    """How a lease ended."""

    ACKNOWLEDGED = auto()
    CANCELLED = auto()
    EXPIRED = auto()


@dataclass
class Lease:
    """Blocks that are kept for one task.

    Attributes:
        num_bytes: Their size.
        deadline: When they are freed if no further step comes.
        state: The step that came last.
        holder: The incarnation of the worker that has reserved them.
    """

    num_bytes: int
    deadline: float
    state: LeaseState = LeaseState.OFFERED
    holder: str = ""


class LeaseTable:
    """The leases of one worker.

    Args:
        max_bytes: Maximum size of all blocks under leases.
        seconds: How long a lease lasts without a further step.

    Attributes:
        ended: The leases that have ended since the caller emptied this list, whose blocks are to be
            freed.
    """

    def __init__(self, max_bytes: int = MAX_LEASED_BYTES, seconds: float = LEASE_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.ended: list[tuple[Key, LeaseEnd]] = []
        self._leases: dict[Key, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    @property
    def keys(self) -> list[Key]:
        return list(self._leases)

    @property
    def num_bytes(self) -> int:
        """The size of all blocks under leases."""
        return sum(lease.num_bytes for lease in self._leases.values())

    def state(self, key: Key) -> LeaseState | None:
        """The state of a lease; None if it has ended or never was."""
        lease = self._leases.get(key)
        return None if lease is None else lease.state

    def offer(self, key: Key, num_bytes: int, now: float) -> bool:
        """Keep blocks of this size for a task. False if they are too large, or kept already."""
        if key in self._leases or self.num_bytes + num_bytes > self.max_bytes:
            return False
        self._leases[key] = Lease(num_bytes, now + self.seconds)
        return True

    def reserve(self, key: Key, holder: str, now: float) -> bool:
        """The worker `holder` will pull the blocks. False if they are not there, or reserved by
        another worker."""
        return self._advance(key, holder, now, LeaseState.RESERVED)

    def pull(self, key: Key, holder: str, now: float) -> bool:
        """The worker that has reserved the blocks pulls them now."""
        lease = self._leases.get(key)
        if lease is None or lease.state is LeaseState.OFFERED:
            return False
        return self._advance(key, holder, now, LeaseState.PULLING)

    def acknowledge(self, key: Key, holder: str) -> None:
        """The worker has the blocks, or needs them no more."""
        lease = self._leases.get(key)
        if lease is not None and lease.holder == holder:
            self._end(key, LeaseEnd.ACKNOWLEDGED)

    def cancel(self, key: Key) -> None:
        """The task needs the blocks no more."""
        if key in self._leases:
            self._end(key, LeaseEnd.CANCELLED)

    def expire(self, now: float) -> None:
        """End the leases whose deadline has passed."""
        for key in [key for key, lease in self._leases.items() if lease.deadline <= now]:
            self._end(key, LeaseEnd.EXPIRED)

    def _advance(self, key: Key, holder: str, now: float, state: LeaseState) -> bool:
        self.expire(now)
        lease = self._leases.get(key)
        if lease is None or lease.holder not in ("", holder):
            return False
        lease.holder, lease.deadline = holder, now + self.seconds
        if lease.state.value < state.value:
            lease.state = state
        return True

    def _end(self, key: Key, how: LeaseEnd) -> None:
        del self._leases[key]
        self.ended.append((key, how))
