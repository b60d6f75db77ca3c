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


class RoleControl:
    """Decides when a worker changes its role. This one knows one scenario, and measures nothing.

    Attributes:
        num_scenarios: The number of scenarios, each with workers of its own.
    """

    num_scenarios = 1

    def scenario(self, num_tokens: int) -> int:
        """The number of the scenario of a prompt of so many tokens."""
        return 0

    def record_arrival(self, scenario: int) -> None:
        """A request of a scenario has come."""

    def record_prefill(self, scenario: int, seconds: float) -> None:
        """A prompt of a scenario was at a prefill worker for so long."""

    def record_decode(self, scenario: int, seconds: float) -> None:
        """An answer of a scenario was at a decode worker for so long."""

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
