"""Workers and roles by predicted latency: which workers a task goes to, when a worker changes its
role, and when requests that may wait run beside the others.

Liu et al., "xLLM Technical Report", arXiv:2510.14686; its service, jd-opensource/xllm-service.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.cluster.control.roles import (
    Change,
    Group,
    Placement,
    RoleControl,
    TaskNeeds,
    WorkerLoad,
)
from anydecode.errors import InvalidRequestError

#: A worker gets an offline task below this part of its cache, and of the limit between tokens.
MAX_OFFLINE_USAGE = 0.9
MAX_OFFLINE_LOAD = 0.9
#: With the task, the predicted time between tokens is at most this part of the limit.
MAX_OFFLINE_SECONDS = 0.98
#: The number of observations that a prediction is fitted to, and from which on there is one.
_WINDOW = 256
_MIN_OBSERVATIONS = 8
_MAX_LENGTH = 1 << 24


class LatencyModel:
    """Seconds by least squares, as a sum of features with coefficients."""

    def __init__(self) -> None:
        self._observations: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._coefficients: np.ndarray | None = None
        self._is_fitted = True

    def record(self, features: tuple[float, ...], seconds: float) -> None:
        """Something with these features has taken so long."""
        self._observations.append((features, seconds))
        self._is_fitted = False

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for a prediction."""
        return len(self._observations) >= _MIN_OBSERVATIONS

    def seconds(self, features: tuple[float, ...]) -> float:
        """The predicted duration, 0 or more."""
        if not self._is_fitted:
            rows = np.array([one for one, _ in self._observations], np.float64)
            scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
            values = np.array([one for _, one in self._observations], np.float64)
            self._coefficients = np.linalg.lstsq(rows / scale, values, rcond=1e-9)[0] / scale
            self._is_fitted = True
        assert self._coefficients is not None
        return max(0.0, float(self._coefficients @ np.array(features, np.float64)))


def cache_score(worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> float:
    """How well a task goes to a worker, of those that could get it: more of its blocks are there,
    less of the cache is in use, and fewer prompts wait."""
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
            "offline requests that decode on prefill workers; they wait at the proxy until a decode"
            " worker takes them",
            "offline prompts that stop between two layers when an online request comes, within a"
            " fleet; the schedule `online-offline` does that in one process",
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
            "the tasks of a lost worker are computed again from their tokens, where most of their"
            " blocks are; blocks of a worker that lives are not migrated",
        ),
    )
)
class SloControl(RoleControl):
    """Chooses workers by predicted latency.

    A prompt goes to the prefill worker with the shortest predicted time, an answer to the first
    decode worker whose predicted time between tokens is within the limit. If the prefill time is
    above its limit, a decode worker with little to do computes the prompt itself. If no decode
    worker is within the limit and prefill workers have time left, one of them becomes a decode
    worker.

    Args:
        ttft: Limit of the time to the first token, in seconds.
        tpot: Limit of the time between tokens, in seconds.
        policy: "slo", or "cache": the worker with the best `cache_score`; roles then stay.
        period: Minimum number of seconds between two changes of roles.

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
    ) -> None:
        if not (ttft > 0 and tpot > 0 and period >= 0 and policy in ("slo", "cache")):
            raise InvalidRequestError(
                f"xllm has ttft={ttft}, tpot={tpot}, policy={policy!r} and period={period}; allowed"
                " are times above 0, a period of 0 or more, and the policies slo and cache"
            )
        self.ttft = ttft
        self.tpot = tpot
        self.policy = policy
        self.period = period
        self.prompts = LatencyModel()
        self.tokens = LatencyModel()
        self._flipped: float | None = None
        self._idle_since: dict[str, float] = {}

    def record_prompt(self, num_rows: int, seconds: float) -> None:
        self.prompts.record((1.0, num_rows, num_rows**2), seconds)

    def record_token(self, num_answers: int, num_positions: int, seconds: float) -> None:
        self.tokens.record((1.0, num_answers, num_positions), seconds)

    def place(self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]) -> Placement | None:
        decode = [one for one in workers if one.role != "prefill"]
        is_known = self.prompts.is_known and self.tokens.is_known
        if not decode or (self.policy == "slo" and not is_known):
            return None
        free = [one for one in decode if one.can_decode]
        if task.is_offline and is_known:
            free = [one for one in free if self._takes_offline(one, task.length)]
        flip = None if task.is_offline else self._flip(now, task, workers)
        if not free:
            return Placement(None, flip=flip)
        best = self._decode_worker(task, free)
        prefill = [one for one in workers if one.role == "prefill" and one.group == best.group]
        if not (best.needs_prefill and prefill):
            return Placement(best.name, flip=flip)
        chosen = self._prefill_worker(prefill)
        if self.policy == "slo" and task.waited + self._prefill_seconds(chosen) > self.ttft:
            light = [one for one in free if self._is_light(one, chosen, decode)]
            if light:
                return Placement(min(light, key=self._prefill_seconds).name, flip=flip)
        ready = [one for one in prefill if one.can_prefill and one.name != flip]
        if not ready:
            return Placement(None, flip=flip)
        return Placement(self._prefill_worker(ready).name, is_prefill=True, flip=flip)

    def step(
        self, now: float, groups: Sequence[Group], prefill_places: int, decode_places: int
    ) -> list[Change]:
        """None: roles change in `place` and `idle_flip`. Arguments as for `RoleControl.step`."""
        return []

    def idle_flip(self, now: float, workers: Sequence[WorkerLoad]) -> str | None:
        decode = [one for one in workers if one.role == "decode"]
        idle = [one.name for one in decode if not (one.num_answers or one.prompts)]
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        waits = any(one.prompts for one in workers if one.role == "prefill")
        rested = [name for name in idle if now - self._idle_since[name] >= self.period]
        if len(decode) < 2 or not (waits and rested and self._may_flip(now)):
            return None
        self._flipped = now
        return rested[0]

    def preferred_length(self, workers: Sequence[WorkerLoad]) -> int | None:
        decode = [one for one in workers if one.role != "prefill" and one.can_decode]
        if not (decode and self.tokens.is_known):
            return None
        limit = MAX_OFFLINE_SECONDS * self.tpot
        return max(
            bisect_right(range(_MAX_LENGTH), limit, key=partial(self._with, one)) - 1
            for one in decode
        )

    # Predictions, in seconds.

    def _prefill_seconds(self, worker: WorkerLoad) -> float:
        """Until the task's prompt is computed, if it goes to this worker."""
        return sum(
            self.prompts.seconds((1.0, rows, rows**2))
            for rows in (*worker.prompts, worker.num_uncached)
        )

    def _token_seconds(self, worker: WorkerLoad) -> float:
        """Between two tokens of its answers."""
        return self.tokens.seconds((1.0, worker.num_answers, worker.num_positions))

    def _with(self, worker: WorkerLoad, length: int) -> float:
        """As before, with one more answer of so many tokens."""
        features = 1.0, worker.num_answers + 1, worker.num_positions + length
        return self.tokens.seconds(features)

    # Rules.

    def _decode_worker(self, task: TaskNeeds, free: Sequence[WorkerLoad]) -> WorkerLoad:
        if self.policy == "cache":
            return max(free, key=lambda one: cache_score(one, free))
        within = [one for one in free if self._with(one, task.length) <= self.tpot]
        return within[0] if within else min(free, key=lambda one: self._with(one, task.length))

    def _prefill_worker(self, prefill: Sequence[WorkerLoad]) -> WorkerLoad:
        if self.policy == "cache":
            return max(prefill, key=lambda one: cache_score(one, prefill))
        return min(prefill, key=self._prefill_seconds)

    def _is_light(
        self, worker: WorkerLoad, prefill: WorkerLoad, decode: Sequence[WorkerLoad]
    ) -> bool:
        limit = self.tpot * (len(decode) - 1) / len(decode)
        return self._token_seconds(worker) < limit and self._prefill_seconds(
            worker
        ) < self._prefill_seconds(prefill)

    def _flip(self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]) -> str | None:
        """The prefill worker that becomes a decode worker."""
        prefill = [one for one in workers if one.role == "prefill"]
        decode = [one for one in workers if one.role != "prefill"]
        if self.policy == "cache" or len(prefill) < 2 or not self._may_flip(now):
            return None
        if any(one.can_decode and self._with(one, task.length) <= self.tpot for one in decode):
            return None
        times = [self._prefill_seconds(one) for one in prefill]
        limit = self.ttft * (len(prefill) - 1) / len(prefill)
        if sum(times) / len(times) >= limit and len(decode) >= len(prefill):
            return None
        self._flipped = now
        return prefill[times.index(min(times))].name

    def _may_flip(self, now: float) -> bool:
        return self._flipped is None or now - self._flipped >= self.period

    def _takes_offline(self, worker: WorkerLoad, length: int) -> bool:
        if not (worker.num_answers or worker.prompts):
            return True
        return (
            worker.usage < MAX_OFFLINE_USAGE
            and self._token_seconds(worker) < MAX_OFFLINE_LOAD * self.tpot
            and self._with(worker, length) <= MAX_OFFLINE_SECONDS * self.tpot
        )
