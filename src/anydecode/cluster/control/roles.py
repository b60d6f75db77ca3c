"""Interface of the methods that change the roles of workers: their inputs and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """How many workers of each role serve a scenario, and how many tasks wait for each role.

    Attributes:
        prefill: The number of prefill workers.
        decode: The number of decode workers.
        encode: The number of encode workers. They serve all scenarios and are counted in the first.
        waiting: By role, the number of images or tasks that wait for a worker of this role.
    """

    prefill: int
    decode: int
    encode: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A worker changes its role, its scenario or both.

    Attributes:
        source: The present number of its scenario, and its present role.
        target: The new ones.
    """

    source: tuple[int, str]
    target: tuple[int, str]


@dataclass(frozen=True)
class TaskNeeds:
    """A task that waits for a worker.

    Attributes:
        length: Number of its tokens, those of its answer so far included.
        waited: Seconds since it was submitted.
        is_offline: Whether it may wait for tasks that are not.
    """

    length: int
    waited: float = 0.0
    is_offline: bool = False


@dataclass(frozen=True)
class WorkerLoad:
    """A worker to which a task could go.

    Attributes:
        name: Unique in the fleet.
        role: "mixed", "prefill" or "decode".
        group: Keys and values are handed over only between workers of the same group.
        prompts: The number of rows of each prompt that it has to compute.
        num_answers: The number of answers that it generates.
        num_positions: The number of tokens of these answers and their prompts.
        usage: The share of its cache that is in use, from 0 to 1.
        num_matched: The number of leading blocks of the task's prompt that are in its cache.
        num_uncached: The number of tokens of the task that are not in its cache.
        needs_prefill: Whether a prefill worker is to compute the task's prompt for it.
        can_prefill: Whether it has room for one more prompt to compute for another worker.
        can_decode: Whether it has room for the task.
    """

    name: str
    role: str
    group: str = ""
    prompts: tuple[int, ...] = ()
    num_answers: int = 0
    num_positions: int = 0
    usage: float = 0.0
    num_matched: int = 0
    num_uncached: int = 0
    needs_prefill: bool = True
    can_prefill: bool = True
    can_decode: bool = True


@dataclass(frozen=True)
class TaskPlacement:
    """Where a task goes.

    Attributes:
        worker: The name of the worker; None: the task waits.
        is_prefill: Whether that worker only computes the prompt, for another worker.
        flip: The name of a prefill worker that is to become a decode worker, or None.
    """

    worker: str | None
    is_prefill: bool = False
    flip: str | None = None


class RoleControl:
    """Base class of the methods that change the roles of workers. It has one scenario, and ignores
    what is recorded.

    Attributes:
        num_scenarios: The number of scenarios, each with workers of its own.
        has_placement: Whether `place`, `preferred_length`, `idle_flip` and `record_token` are
            called; if not, a task goes to the worker with the fewest rows to compute before it.
    """

    num_scenarios = 1
    has_placement = False

    def scenario(self, num_tokens: int) -> int:
        """The number of the scenario of a prompt of so many tokens."""
        return 0

    def record_arrival(self, scenario: int) -> None:
        """Called when a request of a scenario has arrived."""

    def record_prefill(self, scenario: int, seconds: float) -> None:
        """Called when a prefill worker has computed a prompt of a scenario, `seconds` after it got
        the prompt."""

    def record_decode(self, scenario: int, seconds: float) -> None:
        """Called when a decode worker has ended an answer of a scenario, `seconds` after it got the
        task."""

    def record_prompt(self, num_rows: int, seconds: float) -> None:
        """Called when a prefill worker has computed a prompt.

        Args:
            num_rows: The number of rows that it has computed.
            seconds: The duration, without the time in which it computed other prompts.
        """

    def record_token(self, num_answers: int, num_positions: int, seconds: float) -> None:
        """Called when a token has come from a worker that computes no prompt.

        Args:
            num_answers: The number of answers that the worker generates.
            num_positions: The number of tokens of these answers and their prompts.
            seconds: The time since the token before.
        """

    def step(
        self, now: float, groups: Sequence[Group], prefill_places: int, decode_places: int
    ) -> list[Change]:
        """The workers that change now; by default none.

        Args:
            now: The time in seconds.
            groups: The workers of each scenario.
            prefill_places: Maximum number of prompts at a prefill worker.
            decode_places: Maximum number of answers at a decode worker.
        """
        return []

    def idle_flip(self, now: float, workers: Sequence[WorkerLoad]) -> str | None:
        """The name of a decode worker without tasks that becomes a prefill worker now, or None."""
        return None

    def place(
        self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]
    ) -> TaskPlacement | None:
        """Where a task goes; None: to the worker with the fewest rows to compute before it.

        Args:
            now: The time in seconds.
            task: The task.
            workers: Those that could run it, in the order in which they have joined.
        """
        return None

    def preferred_length(self, workers: Sequence[WorkerLoad]) -> int | None:
        """The length in tokens that the next offline task should have; None: any."""
        return None
