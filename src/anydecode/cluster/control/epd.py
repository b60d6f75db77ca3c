"""Workers that encode images, compute prompts or generate, and change to the stage with the longest
queue.

Singh et al., "Efficiently Serving Large Multimodal Models Using EPD Disaggregation",
arXiv:2501.05460.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anydecode.catalogue import Card, register
from anydecode.cluster.control.roles import Change, Group, RoleControl
from anydecode.errors import InvalidRequestError

STAGES = ("encode", "prefill", "decode")


@register(
    Card(
        "epd",
        "serving",
        paper="Singh et al. 2025, EPD, arXiv:2501.05460",
        exactness="token-exact",
        use="anydecode cluster up --encode E --prefill P --decode D --ratio epd",
        summary="Encodes images, computes prompts and generates on workers of their own; a worker"
        " goes to the stage with the longest queue.",
        missing=(
            "encoders of published vision models but LLaVA 1.5's (`models/clip.py`, in Python"
            " only); by default a small encoder with random weights stands in",
            "encode workers without the language model, which saves their memory: here every worker"
            " has the model and the encoder, and can take any role",
        ),
        deviations=(
            "a stage's queue is what waits at the proxy for a worker of this stage, not what waits"
            " at its workers",
            "the worker that computes the prompt pulls the embeddings when all are computed; it"
            " encodes again those that do not come",
            "a worker that changes its role finishes what it has, and is not drained",
            "a stage without workers never gets one; without encode workers, the worker that"
            " computes a prompt encodes its images",
            "workers are allocated by `anydecode cluster plan --images`, which simulates every"
            " placement, with the search of distserve",
            "a decode worker computes the last rows of a prompt again, and encodes an image that is"
            " among them",
        ),
    )
)
class RoleSwitch(RoleControl):
    """Decides when a worker changes its role.

    Every `period` the stage with the longest queue gets a worker. It comes from a stage that has at
    least two workers and whose queue is shorter than `balance` times the longest; if there are
    several, from the one with the most workers, and if there is none, no role changes. The length
    of a queue is its average over the period.

    Args:
        period: Seconds between two evaluations.
        sample: Seconds between two measurements of the queues.
        balance: The share of the longest queue below which a queue is short, from 0 to 1.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    def __init__(self, period: float = 5.0, sample: float = 1.0, balance: float = 0.5) -> None:
        if not (0 < sample <= period and 0 <= balance <= 1):
            raise InvalidRequestError(
                f"epd has period={period:g}, sample={sample:g} and balance={balance:g}; allowed are"
                " a sample above 0 and up to the period, and a balance from 0 to 1"
            )
        self.period = period
        self.sample = sample
        self.balance = balance
        self._next: float | None = None
        self._next_sample = float("-inf")
        self._samples: list[Mapping[str, int]] = []

    def step(
        self, now: float, groups: Sequence[Group], prefill_places: int, decode_places: int
    ) -> list[Change]:
        """The worker that changes now, if one does. Arguments as for `RoleControl.step`."""
        group = groups[0]
        if now >= self._next_sample:
            self._samples.append(group.waiting)
            self._next_sample = now + self.sample
        if self._next is None:
            self._next = now + self.period
        if now < self._next:
            return []
        self._next = now + self.period
        samples, self._samples = self._samples, []
        numbers = {stage: getattr(group, stage) for stage in STAGES}
        queues = {
            stage: sum(one.get(stage, 0) for one in samples) / len(samples)
            for stage, number in numbers.items()
            if number
        }
        if not queues:
            return []
        longest = max(queues, key=lambda stage: queues[stage])
        givers = [
            stage
            for stage, queue in queues.items()
            if queue < self.balance * queues[longest] and numbers[stage] > 1
        ]
        if not givers:
            return []
        giver = max(givers, key=lambda stage: (numbers[stage], -queues[stage]))
        return [Change((0, giver), (0, longest))]
