"""What methods that change the roles of workers are told, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """How many workers of each role serve a scenario, and how many tasks wait for each role.

    Attributes:
        prefill: The number of prefill workers.
        decode: The number of decode workers.
        encode: The number of encode workers, which serve all scenarios: that of the first one has
            them.
        waiting: The number of images and of tasks, by role, that a worker of this role would get
            next if one were free.
    """

    prefill: int
    decode: int
    encode: int = 0
    waiting: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Change:
    """A worker goes from one scenario and role to others.

    Attributes:
        source: The number of its scenario, and its role.
        target: The next ones.
    """

    source: tuple[int, str]
    target: tuple[int, str]


@dataclass(frozen=True)
class TaskNeeds:
    """A task that waits for a worker.

    Attributes:
        length: Number of its tokens, those of its answer so far included.
        waited: Seconds since it came.
        is_offline: Whether it may wait for others.
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
        group: Keys and values go between workers of one group only.
        prompts: The rows of each prompt that it has to compute.
        num_answers: Number of the answers that it generates.
        num_positions: Number of tokens of these answers and their prompts.
        usage: The part of its cache that is in use.
        num_matched: The leading blocks of the task's prompt that are in its cache.
        num_uncached: The tokens of the task that are not.
        needs_prefill: Whether a prefill worker is to compute the task's prompt for it.
        can_prefill: Whether it may get a prompt to compute for another worker.
        can_decode: Whether it may get a task.
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
class Placement:
    """Where a task goes.

    Attributes:
        worker: The name of the worker; None: it waits.
        is_prefill: Whether that worker computes its prompt for another one.
        flip: The name of a prefill worker that is to become a decode worker, or None.
    """

    worker: str | None
    is_prefill: bool = False
    flip: str | None = None


class RoleControl:
    """Decides when a worker changes its role. This one knows one scenario, and measures nothing.

    Attributes:
        num_scenarios: The number of scenarios, each with workers of its own.
        has_placement: Whether `place`, `preferred_length` and `idle_flip` are called; if not, tasks
            go to the worker that has to compute the fewest rows before them.
    """

    num_scenarios = 1
    has_placement = False

    def scenario(self, num_tokens: int) -> int:
        """The number of the scenario of a prompt of so many tokens."""
        return 0

    def record_arrival(self, scenario: int) -> None:
        """A request of a scenario has come."""

    def record_prefill(self, scenario: int, seconds: float) -> None:
        """A prompt of a scenario was at a prefill worker for so long."""

    def record_decode(self, scenario: int, seconds: float) -> None:
        """An answer of a scenario was at a decode worker for so long."""

    def record_prompt(self, num_rows: int, seconds: float) -> None:
        """A prefill worker has computed a prompt in so long, waiting not included."""

    def record_token(self, num_answers: int, num_positions: int, seconds: float) -> None:
        """A token has come so long after the one before, on a worker that generates so many answers
        of so many tokens in all, and computes no prompt."""

    def step(
        self, now: float, groups: Sequence[Group], prefill_places: int, decode_places: int
    ) -> list[Change]:
        """The workers that change now.

        Args:
            now: The time in seconds.
            groups: The workers of each scenario.
            prefill_places: How many prompts are at a prefill worker at a time.
            decode_places: How many answers are at a decode worker at a time.
        """
        raise NotImplementedError

    def idle_flip(self, now: float, workers: Sequence[WorkerLoad]) -> str | None:
        """The name of a decode worker without tasks that becomes a prefill worker now, or None."""
        return None

    def place(self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]) -> Placement | None:
        """Where a task goes; None: by the rows that a worker has to compute.

        Args:
            now: The time in seconds.
            task: The task.
            workers: Those that could run it, in the order in which they have joined.
        """
        return None

    def preferred_length(self, workers: Sequence[WorkerLoad]) -> int | None:
        """The number of tokens that an offline task should have to go next; None: any."""
        return None
