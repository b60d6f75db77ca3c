"""Chooses by predicted latency to which worker a task goes, when a worker changes its role, and
when offline requests run beside the others.

Liu et al., "xLLM Technical Report", arXiv:2510.14686; its service, jd-opensource/xllm-service.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.cluster.control.roles import (
    RoleControl,
    TaskNeeds,
    TaskPlacement,
    WorkerLoad,
)
from anydecode.errors import InvalidRequestError

#: A worker gets an offline task while a smaller share of its cache than this is in use.
MAX_OFFLINE_USAGE = 0.9
#: And while its predicted time between tokens is below this share of the limit.
MAX_OFFLINE_LOAD = 0.9
#: And if the predicted time with the task is at most this share of the limit.
MAX_OFFLINE_SECONDS = 0.98
#: A prediction is fitted to so many of the latest observations.
_WINDOW = 256
#: There is no prediction with fewer observations.
_MIN_OBSERVATIONS = 8
#: Maximum preferred length of an offline task.
_MAX_LENGTH = 1 << 24


class LatencyModel:
    """Predicts a duration as a linear combination of features. The coefficients are fitted to the
    latest observations by least squares."""

    def __init__(self) -> None:
        self._observations: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._coefficients: np.ndarray | None = None
        self._is_fitted = True

    def record(self, features: tuple[float, ...], seconds: float) -> None:
        """Add an observation: the features, and the duration in seconds."""
        self._observations.append((features, seconds))
        self._is_fitted = False

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for a prediction."""
        return len(self._observations) >= _MIN_OBSERVATIONS

    def seconds(self, features: tuple[float, ...]) -> float:
        """The predicted duration in seconds, 0 or more. Needs observations."""
        if not self._is_fitted:
            rows = np.array([one for one, _ in self._observations], np.float64)
            scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
            values = np.array([one for _, one in self._observations], np.float64)
            self._coefficients = np.linalg.lstsq(rows / scale, values, rcond=1e-9)[0] / scale
            self._is_fitted = True
        assert self._coefficients is not None
        return max(0.0, float(self._coefficients @ np.array(features, np.float64)))


def cache_score(worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> float:
    """The score of one of the workers that could get a task: higher with more cached blocks of the
    task, less use of the cache and fewer waiting prompts."""
    max_matched = max(one.num_matched for one in workers)
    max_waiting = max(len(one.prompts) for one in workers)
    matched = worker.num_matched / max_matched if max_matched else 0.0
    waiting = len(worker.prompts) / max_waiting if max_waiting else 0.0
    return matched - worker.usage - waiting


@register(
    Card(
        "xllm",
        "serving",
        paper="Liu et al. 2025, xLLM Technical Report, arXiv:2510.14686",
        exactness="token-exact",
        use="anydecode cluster up --prefill P --decode D --ratio xllm",
        summary="Tasks go to workers by predicted latency or cached blocks; roles follow the load.",
        missing=(
            "offline answers that a decode worker takes from a prefill worker while they run: they"
            " end where they have begun",
            "tiers of the global cache: the index has what workers have in main memory",
            "placement of experts, and encoders as workers",
        ),
        deviations=(
            "predictions are fitted to the latest times that the proxy has seen, not to a profile"
            " that workers bring; before there are 8 of each, tasks go to the worker that has to"
            " compute the fewest rows",
            "the prefill time is that of the tokens in no cache of the worker, plus the time for"
            " which the task has waited, since the proxy has the only queue",
            "the decode worker is chosen when the prompt is computed, not before",
            "a prefill worker computes its prompts before it becomes a decode worker; roles change"
            " at most once in `period` seconds; a decode worker becomes a prefill worker after"
            " `period` seconds without tasks, while prefill workers have prompts",
            "a worker without tasks takes an offline task whatever its predicted time",
            "the number of offline answers at a prefill worker is a parameter, not the batch at"
            " which a roofline model says that passes are bound by arithmetic",
            "an offline prompt stops between two layers when an online one comes where the workers"
            " have the schedule `online-offline` (`cluster up --schedule`); else after the pass",
            "the tasks of a lost worker are computed again from their tokens, where most of their"
            " blocks are; blocks of a worker that lives are not migrated",
        ),
        bounds={"offline": Range(0, 1024)},
    )
)
class SloControl(RoleControl):
    """Chooses workers by predicted latency.

    A prompt goes to the prefill worker with the shortest predicted time, and its answer to the
    first decode worker whose predicted time between tokens is within the limit. If the predicted
    prefill time is above its limit, a decode worker with little to do computes the prompt itself.
    If no decode worker is within the limit, and prefill workers are within theirs or are the
    majority, one of them becomes a decode worker. An offline task that no decode worker takes runs
    on a prefill worker without prompts.

    Args:
        ttft: Limit of the time to the first token, in seconds.
        tpot: Limit of the time between tokens, in seconds.
        policy: "slo", or "cache": the worker with the best `cache_score`; roles then stay.
        period: Minimum number of seconds between two changes of roles.
        offline: Maximum number of offline answers that a prefill worker generates, while no decode
            worker takes them; 0: none.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    has_placement = True

    def __init__(
        self,
        ttft: float = 1.0,
        tpot: float = 0.05,
        policy: str = "slo",
        period: float = 5.0,
        offline: int = 4,
    ) -> None:
        is_valid = ttft > 0 and tpot > 0 and period >= 0 and offline >= 0
        if not (is_valid and policy in ("slo", "cache")):
            raise InvalidRequestError(
                f"xllm has ttft={ttft}, tpot={tpot}, policy={policy!r}, period={period} and"
                f" offline={offline}; allowed are times above 0, a period and a number of offline"
                " answers of 0 or more, and the policies slo and cache"
            )
        self.ttft = ttft
        self.tpot = tpot
        self.policy = policy
        self.period = period
        self.offline = offline
        self.prompts = LatencyModel()
        self.tokens = LatencyModel()
        self._changed_at: float | None = None  # when a role changed last
        self._idle_since: dict[str, float] = {}

    def record_prompt(self, num_rows: int, seconds: float) -> None:
        self.prompts.record((1.0, num_rows, num_rows**2), seconds)

    def record_token(self, num_answers: int, num_positions: int, seconds: float) -> None:
        self.tokens.record((1.0, num_answers, num_positions), seconds)

    def place(
        self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]
    ) -> TaskPlacement | None:
        decode = [one for one in workers if one.role != "prefill"]
        is_known = self.prompts.is_known and self.tokens.is_known
        if not decode or (self.policy == "slo" and not is_known):
            return None
        free = [one for one in decode if one.can_decode]
        if task.is_offline and is_known:
            free = [one for one in free if self._takes_offline(one, task.length)]
        flip = None if task.is_offline else self._flip(now, task, workers)
        if not free:
            idle = [one for one in workers if task.is_offline and self._is_idle_prefill(one)]
            if is_known and idle:
                return TaskPlacement(min(idle, key=self._prefill_seconds).name)
            return TaskPlacement(None, flip=flip)
        best = self._decode_worker(task, free)
        prefill = [one for one in workers if one.role == "prefill" and one.group == best.group]
        if not (best.needs_prefill and prefill):
            return TaskPlacement(best.name, flip=flip)
        if self.policy == "slo":
            seconds = min(map(self._prefill_seconds, prefill))
            is_late = task.waited + seconds > self.ttft
            light = [one for one in free if is_late and self._is_light(one, seconds, len(decode))]
            if light:
                return TaskPlacement(min(light, key=self._prefill_seconds).name, flip=flip)
        ready = [one for one in prefill if one.can_prefill and one.name != flip]
        if not ready:
            return TaskPlacement(None, flip=flip)
        return TaskPlacement(self._prefill_worker(ready).name, is_prefill=True, flip=flip)

    def idle_flip(self, now: float, workers: Sequence[WorkerLoad]) -> str | None:
        decode = [one for one in workers if one.role == "decode"]
        idle = [one.name for one in decode if not (one.num_answers or one.prompts)]
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        has_prompts = any(one.prompts for one in workers if one.role == "prefill")
        ready = [name for name in idle if now - self._idle_since[name] >= self.period]
        if len(decode) < 2 or not (has_prompts and ready and self._may_change(now)):
            return None
        self._changed_at = now
        return ready[0]

    def preferred_length(self, workers: Sequence[WorkerLoad]) -> int | None:
        decode = [one for one in workers if one.role != "prefill" and one.can_decode]
        if not (decode and self.tokens.is_known):
            return None
        limit = MAX_OFFLINE_SECONDS * self.tpot
        return max(
            bisect_right(range(_MAX_LENGTH), limit, key=partial(self._token_seconds_with, one)) - 1
            for one in decode
        )

    # Predictions, in seconds.

    def _prefill_seconds(self, worker: WorkerLoad) -> float:
        """The time until the task's prompt is computed, if it goes to this worker."""
        return sum(
            self.prompts.seconds((1.0, rows, rows**2))
            for rows in (*worker.prompts, worker.num_uncached)
        )

    def _token_seconds(self, worker: WorkerLoad) -> float:
        """The time between two tokens of a worker's answers."""
        return self.tokens.seconds((1.0, worker.num_answers, worker.num_positions))

    def _token_seconds_with(self, worker: WorkerLoad, length: int) -> float:
        """The same with one more answer, whose text has `length` tokens with its prompt."""
        features = 1.0, worker.num_answers + 1, worker.num_positions + length
        return self.tokens.seconds(features)

    # Rules.

    def _decode_worker(self, task: TaskNeeds, free: Sequence[WorkerLoad]) -> WorkerLoad:
        if self.policy == "cache":
            return max(free, key=lambda one: cache_score(one, free))
        within = (one for one in free if self._is_within(one, task.length))
        fastest = partial(self._token_seconds_with, length=task.length)
        return next(within, None) or min(free, key=fastest)

    def _is_within(self, worker: WorkerLoad, length: int) -> bool:
        """Whether a worker stays within the limit between tokens, with one more answer."""
        return self._token_seconds_with(worker, length) <= self.tpot

    def _prefill_worker(self, prefill: Sequence[WorkerLoad]) -> WorkerLoad:
        if self.policy == "cache":
            return max(prefill, key=lambda one: cache_score(one, prefill))
        return min(prefill, key=self._prefill_seconds)

    def _is_light(self, worker: WorkerLoad, prefill_seconds: float, num_decode: int) -> bool:
        """Whether one of `num_decode` decode workers has little to do, and would have computed the
        prompt within fewer than `prefill_seconds`."""
        limit = self.tpot * (num_decode - 1) / num_decode
        return (
            self._token_seconds(worker) < limit and self._prefill_seconds(worker) < prefill_seconds
        )

    def _flip(self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]) -> str | None:
        """The prefill worker that becomes a decode worker, or None."""
        prefill = [one for one in workers if one.role == "prefill"]
        decode = [one for one in workers if one.role != "prefill"]
        if self.policy == "cache" or len(prefill) < 2 or not self._may_change(now):
            return None
        if any(one.can_decode and self._is_within(one, task.length) for one in decode):
            return None
        times = [self._prefill_seconds(one) for one in prefill]
        limit = self.ttft * (len(prefill) - 1) / len(prefill)
        if sum(times) / len(times) >= limit and len(decode) >= len(prefill):
            return None
        self._changed_at = now
        return prefill[times.index(min(times))].name

    def _may_change(self, now: float) -> bool:
        return self._changed_at is None or now - self._changed_at >= self.period

    def _is_idle_prefill(self, worker: WorkerLoad) -> bool:
        """Whether a prefill worker may compute and generate an offline task."""
        is_idle = worker.role == "prefill" and not worker.prompts
        return is_idle and worker.can_decode and worker.num_answers < self.offline

    def _takes_offline(self, worker: WorkerLoad, length: int) -> bool:
        if not (worker.num_answers or worker.prompts):
            return True
        return (
            worker.usage < MAX_OFFLINE_USAGE
            and self._token_seconds(worker) < MAX_OFFLINE_LOAD * self.tpot
            and self._token_seconds_with(worker, length) <= MAX_OFFLINE_SECONDS * self.tpot
        )
