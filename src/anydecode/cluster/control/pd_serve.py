"""Groups of workers by scenario, and the ratio of prefill to decode workers in each of them.

Jin et al., "P/D-Serve: Serving Disaggregated Large Language Model at Scale", arXiv:2408.08147.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from anydecode.catalogue import Card, register
from anydecode.cluster.control.roles import Change, Group, RoleControl
from anydecode.errors import InvalidRequestError

#: The weight of one task in the moving average of times.
_WEIGHT = 0.1
#: The weight of one period in the moving average of arrivals.
_RATE_WEIGHT = 0.5
_MAX_SCENARIOS = 64


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
        deviations=(
            "scenarios are ranges of the prompts' lengths (`lengths`), not services that an"
            " operator names; a worker also changes its group, where the paper starts and ends"
            " workers of a group",
            "every fleet forwards on demand: a worker accepts or refuses a task at once, and the"
            " proxy, which has the only queue, then tries another",
            "keys and values travel block by block over TCP, not between devices",
            "times are measured where tasks run, waiting behind others included; a role changes"
            " after several evaluations have found the same gain",
            "the fleet's process is the organisation: there is no registry of workers beside it",
        ),
    )
)
class RatioControl(RoleControl):
    """Decides when a worker changes its role, or its scenario.

    Args:
        period: Seconds between two evaluations.
        gain: The relative gain in capacity that a change must bring.
        patience: After how many evaluations in a row that find this gain the change is made.
        lengths: The numbers of tokens up to which the prompts of each scenario but the last one
            go, separated by slashes, such as "256/2048" for three scenarios. Each scenario has
            workers of its own. Empty: there is one.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    def __init__(
        self, period: float = 30.0, gain: float = 0.05, patience: int = 2, lengths: str = ""
    ) -> None:
        if not (period > 0 and gain >= 0 and patience >= 1):
            raise InvalidRequestError(
                f"pd-serve has period={period}, gain={gain} and patience={patience}; allowed are a"
                " period above 0, a gain of 0 or more, and a patience of 1 or more"
            )
        self.period = period
        self.gain = gain
        self.patience = patience
        self._lengths = _read_lengths(lengths)
        self.num_scenarios = len(self._lengths) + 1
        self.prefill_seconds: list[float | None] = [None] * self.num_scenarios
        self.decode_seconds: list[float | None] = [None] * self.num_scenarios
        self._num_arrivals = [0] * self.num_scenarios
        self._rates: list[float | None] = [None] * self.num_scenarios
        self._next: float | None = None
        self._wishes: dict[Hashable, tuple[Change | None, int]] = {}

    def scenario(self, num_tokens: int) -> int:
        return bisect_left(self._lengths, num_tokens)

    def record_arrival(self, scenario: int) -> None:
        self._num_arrivals[scenario] += 1

    def record_prefill(self, scenario: int, seconds: float) -> None:
        times = self.prefill_seconds
        times[scenario] = _averaged(times[scenario], max(seconds, 1e-6), _WEIGHT)

    def record_decode(self, scenario: int, seconds: float) -> None:
        times = self.decode_seconds
        times[scenario] = _averaged(times[scenario], max(seconds, 1e-6), _WEIGHT)

    def step(
        self, now: float, groups: Sequence[Group], prefill_places: int, decode_places: int
    ) -> list[Change]:
        if self._next is None:
            self._next = now + self.period
        if now < self._next:
            return []
        self._next = now + self.period
        for scenario, number in enumerate(self._num_arrivals):
            average = self._rates[scenario]
            self._rates[scenario] = _averaged(average, number / self.period, _RATE_WEIGHT)
            self._num_arrivals[scenario] = 0
        places = prefill_places, decode_places
        changes = []
        for scenario, group in enumerate(groups):
            wish = self._wanted_ratio(scenario, group, *places)
            if self._is_settled(scenario, wish) and wish is not None:
                changes.append(wish)
        move = self._wanted_move(groups, *places)
        if self._is_settled("move", move) and move is not None and not changes:
            changes.append(move)
        return changes

    def _is_settled(self, place: Hashable, wish: Change | None) -> bool:
        """Whether so many evaluations in a row had this wish that it is granted."""
        last, number = self._wishes.get(place, (None, 0))
        number = number + 1 if wish == last else 1
        is_granted = number >= self.patience
        self._wishes[place] = wish, 0 if is_granted else number
        return is_granted

    def _wanted_ratio(self, scenario: int, group: Group, *places: int) -> Change | None:
        """The change of a role in a group that raises its capacity by the gain."""
        times = self.prefill_seconds[scenario], self.decode_seconds[scenario]
        prefill, decode = group.prefill, group.decode
        if times[0] is None or times[1] is None or not (prefill and decode):
            return None
        found = {
            change: capacity(prefill + change, decode - change, times[0], times[1], *places)
            for change in (0, 1, -1)
            if prefill + change >= 1 and decode - change >= 1
        }
        best = max(found, key=lambda change: found[change])
        if found[best] <= (1 + self.gain) * found[0]:
            return None
        roles = ("decode", "prefill") if best > 0 else ("prefill", "decode")
        return Change((scenario, roles[0]), (scenario, roles[1]))

    def _wanted_move(self, groups: Sequence[Group], *places: int) -> Change | None:
        """The move of a worker between two groups that lowers the highest load of a group by the
        gain."""
        loads = [self._load(number, group, *places) for number, group in enumerate(groups)]
        highest = max(loads)
        receiver = loads.index(highest)
        best, best_load = None, highest / (1 + self.gain)
        for giver, group in enumerate(groups):
            for role in ("prefill", "decode"):
                if giver == receiver or getattr(group, role) < 2:
                    continue
                for next_role in ("prefill", "decode"):
                    after = {
                        giver: _with(group, role, -1),
                        receiver: _with(groups[receiver], next_role, 1),
                    }
                    load = max(self._load(one, after[one], *places) for one in after)
                    if load < best_load:
                        best, best_load = Change((giver, role), (receiver, next_role)), load
        return best

    def _load(self, scenario: int, group: Group, *places: int) -> float:
        """Arrivals of a scenario per request that its workers can serve meanwhile."""
        rate = self._rates[scenario] or 0.0
        times = self.prefill_seconds[scenario], self.decode_seconds[scenario]
        if rate == 0 or times[0] is None or times[1] is None:
            return 0.0
        served = capacity(group.prefill, group.decode, times[0], times[1], *places)
        served *= group.prefill + group.decode
        return rate / served if served else float("inf")


def _with(group: Group, role: str, change: int) -> Group:
    is_prefill = role == "prefill"
    return Group(group.prefill + change * is_prefill, group.decode + change * (not is_prefill))


def _read_lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split("/")] if text.strip() else []
    found = [int(part) for part in parts if part.isdecimal() and len(part) <= 9]
    if len(found) < len(parts) or 0 in found or found != sorted(set(found)):
        raise InvalidRequestError(
            f"pd-serve has lengths={text!r}; allowed are rising numbers above 0, such as 256/2048"
        )
    if len(found) >= _MAX_SCENARIOS:
        raise InvalidRequestError(
            f"pd-serve has lengths of {len(found) + 1} scenarios; at most {_MAX_SCENARIOS} are"
            " allowed"
        )
    return found


def _averaged(average: float | None, value: float, weight: float) -> float:
    return value if average is None else (1 - weight) * average + weight * value
