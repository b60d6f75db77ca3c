"""The tasks and leases of one worker, as a state machine without input or output.

Frames of the proxy and events of the engine go in; what the worker has to do comes out, as
`actions`. Every frame may come twice, late or never. The beat tells the proxy what is really
there, and the proxy acts on it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from anydecode.cluster.leases import Key, LeaseTable

Frame = dict[str, Any]

#: Number of ended tasks whose keys are remembered, so that a frame that comes twice starts nothing.
MAX_ENDED = 1024


@dataclass(frozen=True)
class Send:
    """Send a frame to the proxy."""

    frame: Frame


@dataclass(frozen=True)
class Pull:
    """Fetch the blocks of a prompt from the worker `source`, then call `Ledger.pulled`."""

    key: Key
    source: Frame
    frame: Frame


@dataclass(frozen=True)
class PullMedia:
    """Fetch the embeddings of a prompt from the workers that have computed them, then call
    `Ledger.media_pulled`."""

    key: Key
    frame: Frame


@dataclass(frozen=True)
class Start:
    """Start to generate the answer of a `run` frame."""

    key: Key
    frame: Frame


@dataclass(frozen=True)
class StartPrefill:
    """Compute the prompt of a `prefill` frame, then call `Ledger.prefilled`."""

    key: Key
    frame: Frame


@dataclass(frozen=True)
class StartEncode:
    """Encode the image of an `encode` frame, then call `Ledger.prefilled`."""

    key: Key
    frame: Frame


@dataclass(frozen=True)
class Abort:
    """Cancel a pull, a generation, a prefill or an encoding."""

    key: Key


Action = Send | Pull | PullMedia | Start | StartPrefill | StartEncode | Abort


@dataclass
class WorkerTask:
    """A task on its worker.

    Attributes:
        frame: The frame that started it.
        num_tokens: Number of its tokens, those of earlier attempts included.
        num_positions: Positions of the cache that it may need.
    """

    frame: Frame
    num_tokens: int = 0
    num_positions: int = 0


@dataclass
class Ledger:
    """The tasks of one worker.

    Args:
        incarnation: The name of this process, which no other has.
        max_running: Maximum number of tasks at a time.
        positions: Size of the cache.
        leases: The leases of this worker.

    Attributes:
        tasks: The tasks that run, by key.
        seen: The highest number of a frame of the proxy.
        actions: What the worker has to do, in order; the caller empties the list.
    """

    incarnation: str
    max_running: int
    positions: int
    leases: LeaseTable = field(default_factory=LeaseTable)
    tasks: dict[Key, WorkerTask] = field(default_factory=dict)
    seen: int = 0
    actions: list[Action] = field(default_factory=list)
    _ended: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    def handle(self, frame: Frame) -> None:
        """A frame of the proxy."""
        self.seen = max(self.seen, frame["number"])
        kind = frame["type"]
        if kind == "cancel":
            key = (frame["task"], frame["attempt"])
            self._remember(key)
            self.leases.cancel(key)
            if self.tasks.pop(key, None) is not None:
                self.actions.append(Abort(key))
        elif kind in ("run", "prefill", "encode"):
            self._begin(frame)

    def media_pulled(self, key: Key) -> None:
        """The embeddings of a task have come, or will not come."""
        if key in self.tasks:
            self._go_on(key, self.tasks[key].frame)

    def pulled(self, key: Key) -> None:
        """The blocks of a task have come, or will not come."""
        if key in self.tasks:
            self.actions.append(Start(key, self.tasks[key].frame))

    def produced(self, key: Key, tokens: list[int], logprobs: list[Any] | None = None) -> None:
        """The task has new tokens."""
        task = self.tasks.get(key)
        if task is not None and tokens:
            self._send(key, "tokens", start=task.num_tokens, tokens=tokens, logprobs=logprobs)
            task.num_tokens += len(tokens)

    def ended(self, key: Key, **result: Any) -> None:
        """The task has ended, after its last tokens."""
        task = self.tasks.pop(key, None)
        if task is not None:
            self._remember(key)
            self._send(key, "ended", count=task.num_tokens, **result)

    def failed(self, key: Key, kind: str, message: str, is_final: bool) -> None:
        """The task has failed. `is_final`: another worker would give the same error."""
        if self.tasks.pop(key, None) is not None:
            self._remember(key)
            self._send(key, "failed", kind=kind, message=message, is_final=is_final)

    def prefilled(self, key: Key, num_blocks: int, num_bytes: int, now: float) -> bool:
        """The prompt of a task has been computed, or its image encoded. Returns whether the blocks
        are to be kept."""
        if self.tasks.pop(key, None) is None:
            return False
        self._remember(key)
        is_kept = num_blocks > 0 and self.leases.offer(key, num_bytes, now)
        self._send(key, "offered", is_kept=is_kept)
        return is_kept

    def beat(self, now: float, **facts: Any) -> None:
        """Report what is there."""
        self.leases.expire(now)
        frame = {
            "type": "beat",
            "seen": self.seen,
            "tasks": [list(key) for key in self.tasks],
            "leases": [list(key) for key in self.leases.keys],
            **facts,
        }
        self.actions.append(Send(frame))

    def _begin(self, frame: Frame) -> None:
        key = number, attempt = frame["task"], frame["attempt"]
        if key in self.tasks or key in self._ended:
            return
        for other in [other for other in self.tasks if other[0] == number]:
            if other[1] > attempt:
                return
            del self.tasks[other]
            self.actions.append(Abort(other))
        used = sum(task.num_positions for task in self.tasks.values())
        needed = frame["positions"]
        if len(self.tasks) >= self.max_running or (self.tasks and used + needed > self.positions):
            self._send(key, "refused")
            return
        self.tasks[key] = WorkerTask(frame, len(frame.get("generated", ())), needed)
        if any(frame.get("encoded", ())):
            self.actions.append(PullMedia(key, frame))
        else:
            self._go_on(key, frame)

    def _go_on(self, key: Key, frame: Frame) -> None:
        """Begin a task whose embeddings are there, or will not come."""
        if frame["type"] == "prefill":
            self.actions.append(StartPrefill(key, frame))
        elif frame["type"] == "encode":
            self.actions.append(StartEncode(key, frame))
        elif (source := frame.get("source")) is not None:
            self.actions.append(Pull(key, source, frame))
        else:
            self.actions.append(Start(key, frame))

    def _send(self, key: Key, frame_type: str, /, **fields: Any) -> None:
        self.actions.append(Send({"type": frame_type, "task": key[0], "attempt": key[1], **fields}))

    def _remember(self, key: Key) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
