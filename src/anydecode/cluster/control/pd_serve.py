"""The ratio of prefill to decode workers, adjusted to the load.

Jin et al., "P/D-Serve: Serving Disaggregated Large Language Model at Scale", arXiv:2408.08147.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError

#: The weight of one task in the moving average of times.
_WEIGHT = 0.1


def capacity(
    prefill: int,
    decode: int,
    prefill_seconds: float,
    decode_seconds: float,
    prefill_places: int,
    decode_places: int,
) -> float:
    """Requests per second and worker that a group of workers can serve.

    Args:
        prefill: The number of prefill workers.
        decode: The number of decode workers.
        prefill_seconds: How long a prompt is at a prefill worker.
        decode_seconds: How long an answer is at a decode worker.
        prefill_places: How many prompts are at a prefill worker at a time.
        decode_places: How many answers are at a decode worker at a time.
    """
    prompts = prefill * prefill_places / prefill_seconds
    answers = decode * decode_places / decode_seconds
    return min(prompts, answers) / (prefill + decode)


@register(
    Card(
        "pd-serve",
        "serving",
        paper="Jin et al. 2024, P/D-Serve, arXiv:2408.08147",
        exactness="token-exact",
        use="anydecode cluster up --prefill P --decode D --ratio pd-serve",
        summary="Workers change between prefill and decode as the load needs; the proxy queues.",
        missing=("groups of workers by scenario, each with similar prompts and its own ratio",),
        deviations=(
            "every fleet forwards on demand: a worker accepts or refuses a task at once, and the"
            " proxy, which has the only queue, then tries another",
            "keys and values travel block by block over TCP, not between devices",
            "times are measured where tasks run, waiting behind others included; a role changes"
            " after several evaluations have found the same gain",
            "the fleet's process is the organisation: there is no registry of workers beside it",
        ),
    )
)
class RatioControl:
    """Decides when a worker changes its role.

    Args:
        period: Seconds between two evaluations.
        gain: The relative gain in capacity that a change must bring.
        patience: After how many evaluations in a row that find this gain the role changes.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    def __init__(self, period: float = 30.0, gain: float = 0.05, patience: int = 2) -> None:
        if not (period > 0 and gain >= 0 and patience >= 1):
            raise InvalidRequestError(
                f"pd-serve has period={period}, gain={gain} and patience={patience}; allowed are a"
                " period above 0, a gain of 0 or more, and a patience of 1 or more"
            )
        self.period = period
        self.gain = gain
        self.patience = patience
        self.prefill_seconds: float | None = None
        self.decode_seconds: float | None = None
        self._next: float | None = None
        self._wish, self._num_wishes = 0, 0

    def record_prefill(self, seconds: float) -> None:
        """A prompt was at a prefill worker for so long."""
        self.prefill_seconds = _averaged(self.prefill_seconds, seconds)

    def record_decode(self, seconds: float) -> None:
        """An answer was at a decode worker for so long."""
        self.decode_seconds = _averaged(self.decode_seconds, seconds)

    def step(
        self, now: float, prefill: int, decode: int, prefill_places: int, decode_places: int
    ) -> int:
        """How the number of prefill workers changes now: 1, -1 or 0.

        Args:
            now: The time in seconds.
            prefill: The number of prefill workers.
            decode: The number of decode workers.
            prefill_places: How many prompts are at a prefill worker at a time.
            decode_places: How many answers are at a decode worker at a time.
        """
        if self._next is None:
            self._next = now + self.period
        if now < self._next:
            return 0
        self._next = now + self.period
        wish = self._wanted(prefill, decode, prefill_places, decode_places)
        self._num_wishes = self._num_wishes + 1 if wish == self._wish else 1
        self._wish = wish
        if wish == 0 or self._num_wishes < self.patience:
            return 0
        self._num_wishes = 0
        return wish

    def _wanted(self, prefill: int, decode: int, *places: int) -> int:
        if self.prefill_seconds is None or self.decode_seconds is None:
            return 0
        times = self.prefill_seconds, self.decode_seconds
        found = {
            change: capacity(prefill + change, decode - change, *times, *places)
            for change in (0, 1, -1)
            if prefill + change >= 1 and decode - change >= 1
        }
        best = max(found, key=lambda change: found[change])
        return best if found[best] > (1 + self.gain) * found[0] else 0


def _averaged(average: float | None, seconds: float) -> float:
    seconds = max(seconds, 1e-6)
    return seconds if average is None else (1 - _WEIGHT) * average + _WEIGHT * seconds
