"""The search for the roles of workers that serve the most requests within latency limits, and for
the number of such units that a rate needs.

Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language
Model Serving", arXiv:2401.09670.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anydecode.catalogue import Card, Range, register
from anydecode.errors import InvalidRequestError

#: A placement that serves too few requests within the limits at the first rate divided by this has
#: no goodput.
MAX_FALL = 1024
#: Of one request: time to its first token and mean time between its tokens, in seconds; infinite
#: if it has failed.
Latency = tuple[float, float]


@dataclass(frozen=True)
class Placement:
    """How many workers have each role."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0
    encode: int = 0

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.mixed + self.prefill + self.decode + self.encode

    def __str__(self) -> str:
        names = ("encode", "mixed", "prefill", "decode")
        parts = [(name, getattr(self, name)) for name in names]
        return ", ".join(f"{number} {role}" for role, number in parts if number)


@dataclass(frozen=True)
class Limits:
    """Latency limits of every request, in seconds.

    Attributes:
        ttft: Maximum time to its first token.
        tpot: Maximum mean time between its tokens.
    """

    ttft: float
    tpot: float

    def missed(self, latencies: Sequence[Latency]) -> tuple[float, float]:
        """The shares of requests above the limit of the time to the first token, and above that of
        the time between tokens."""
        num = max(1, len(latencies))
        return (
            sum(first > self.ttft for first, _ in latencies) / num,
            sum(each > self.tpot for _, each in latencies) / num,
        )

    def share(self, latencies: Sequence[Latency]) -> float:
        """The share of requests that are within both limits."""
        within = sum(first <= self.ttft and each <= self.tpot for first, each in latencies)
        return within / max(1, len(latencies))


@dataclass(frozen=True)
class Found:
    """What the search has found about one placement.

    Attributes:
        placement: The placement.
        goodput: The highest rate of the probes within the limits, in requests per second.
        probes: The rates that were tried, and the share of requests within the limits, by rate.
        missed: At the lowest rate that is too high, the shares of requests above the limit of the
            time to the first token, and above that of the time between tokens; None: there is none.
    """

    placement: Placement
    goodput: float
    probes: tuple[tuple[float, float], ...]
    missed: tuple[float, float] | None = None

    @property
    def goodput_per_worker(self) -> float:
        """The goodput divided by the number of workers."""
        return self.goodput / self.placement.workers

    @property
    def is_bounded(self) -> bool:
        """Whether a higher rate was tried, at which too few requests are within the limits."""
        return any(rate > self.goodput for rate, _ in self.probes)

    def replicas(self, rate: float) -> int:
        """How many such units serve `rate` requests per second, each an equal share of them."""
        return math.ceil(rate / self.goodput)


#: The latencies of the requests that a placement serves at a rate in requests per second.
Serve = Callable[[Placement, float], Sequence[Latency]]


def placements(workers: int, has_images: bool = False) -> list[Placement]:
    """All placements of so many workers: all mixed, or each prefill or decode. With images, also
    those in which some of the workers encode."""
    found = []
    for encode in range(workers if has_images else 1):
        rest = workers - encode
        split = [Placement(0, n, rest - n, encode) for n in range(1, rest)]
        found += [Placement(mixed=rest, encode=encode), *split]
    return found


def units(workers: int, has_images: bool = False) -> list[Placement]:
    """All placements of so many workers or fewer, the smallest first."""
    numbers = range(1, workers + 1)
    return [one for number in numbers for one in placements(number, has_images)]


@register(
    Card(
        "distserve",
        "serving",
        paper="Zhong et al. 2024, DistServe, arXiv:2401.09670",
        exactness="token-exact",
        use="anydecode cluster plan --trace FILE --slo ttft=SECONDS,tpot=SECONDS --workers N",
        summary="Simulates placements of workers for the one with the most requests within limits.",
        missing=("tensor and pipeline parallelism: a worker is one engine with a whole model",),
        deviations=(
            "a request counts if it is within both limits; the paper's code compares the two"
            " percentiles separately",
            "arrivals are those of the trace, faster or slower, not a Poisson process",
            "the simulator runs the engine and the protocol that serve; the time of transfers, full"
            " decode workers and prompts that wait to be fetched count, which the paper's simulator"
            " leaves out",
            "placements without roles compete, too",
            "replicas of a unit are fleets of their own; that they share the requests evenly is"
            " not simulated",
        ),
        bounds={"max_probes": Range(1, 1000)},
    )
)
class PlacementSearch:
    """Finds the goodput of placements by bisection of the rate.

    Args:
        attainment: The share of requests that must be within the limits, more than 0 and at most 1.
        precision: Relative width of the interval of rates at which a search ends, more than 0.
        max_probes: Maximum number of rates that are tried per placement.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    def __init__(
        self, attainment: float = 0.9, precision: float = 0.05, max_probes: int = 24
    ) -> None:
        if not (0 < attainment <= 1 and precision > 0 and max_probes >= 1):
            raise InvalidRequestError(
                f"distserve has attainment={attainment:g}, precision={precision:g} and"
                f" max_probes={max_probes}; allowed are an attainment above 0 and up to 1, a"
                " precision above 0, and 1 or more probes"
            )
        self.attainment = attainment
        self.precision = precision
        self.max_probes = max_probes

    def search(
        self,
        candidates: Sequence[Placement],
        limits: Limits,
        serve: Serve,
        rate: float = 1.0,
        max_rate: float = math.inf,
    ) -> list[Found]:
        """The goodput of each placement, that with the most per worker first; of equal ones the
        first given.

        Args:
            candidates: The placements.
            limits: The latency limits.
            serve: Serves the trace, or simulates it.
            rate: The rate that is tried first for each placement, in requests per second.
            max_rate: The rate above which none is tried.
        """
        found = [self.goodput(one, limits, serve, rate, max_rate) for one in candidates]
        return sorted(found, key=lambda one: -one.goodput_per_worker)

    def goodput(
        self,
        placement: Placement,
        limits: Limits,
        serve: Serve,
        rate: float,
        max_rate: float = math.inf,
    ) -> Found:
        """The goodput of one placement: the rate doubles until too few requests are within the
        limits, or halves until enough are; then the interval is bisected."""
        rate = min(rate, max_rate)
        low, high, min_rate = 0.0, float("inf"), rate / MAX_FALL
        probes: dict[float, float] = {}
        missed = None
        while (
            len(probes) < self.max_probes
            and high > low * (1 + self.precision)
            and min_rate <= rate <= max_rate
        ):
            latencies = serve(placement, rate)
            probes[rate] = limits.share(latencies)
            if probes[rate] >= self.attainment:
                low = rate
            else:
                high, missed = rate, limits.missed(latencies)
            if low == 0:
                rate = high / 2
            elif high == float("inf"):
                rate = low * 2
            else:
                rate = (low + high) / 2
        return Found(placement, low, tuple(sorted(probes.items())), missed)
