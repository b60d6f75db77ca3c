"""Oracle test of pd-serve (P/D-Serve, arXiv:2408.08147): the best ratio by counting what each
number of workers can serve, and when a role changes, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.cluster.control.pd_serve import RatioControl
from anydecode.cluster.fleet import MAX_PREFILLS, Fleet, SendTo, Task, WorkerFacts


def _served(prefill: int, decode: int, prompt_ms: int, answer_ms: int, batch: int) -> Fraction:
    """Requests that pass both stages in the time that is a multiple of both durations, per
    worker and millisecond: complete rounds of each stage are counted."""
    window = prompt_ms * answer_ms
    prompts = prefill * MAX_PREFILLS * (window // prompt_ms)
    answers = decode * batch * (window // answer_ms)
    return Fraction(min(prompts, answers), window * (prefill + decode))


def _settled(control: RatioControl, prefill: int, decode: int, batch: int) -> int:
    """The number of prefill workers after many periods."""
    for period in range(200):
        change = control.step(100.0 * period, prefill, decode, MAX_PREFILLS, batch)
        prefill, decode = prefill + change, decode - change
    return prefill


@oracle_test("pd-serve")
def pd_serve() -> Iterator[Check]:
    """Six workers: the ratio that serves most is found from every other one, if one more or one
    less serves 5% more each time."""
    for prompt_ms, answer_ms, batch in ((100, 1000, 4), (300, 200, 2), (50, 900, 8), (7, 7, 2)):
        rates = {n: _served(n, 6 - n, prompt_ms, answer_ms, batch) for n in range(1, 6)}
        best = max(rates, key=lambda n: rates[n])
        for start in range(1, 6):
            control = _default()
            control.record_prefill(prompt_ms / 1000)
            control.record_decode(answer_ms / 1000)
            found = _settled(control, start, 6 - start, batch)
            yield Check(
                f"{prompt_ms} and {answer_ms} ms, {batch} answers, from {start}:{6 - start}",
                rates[found] * Fraction(105, 100) >= rates[best],
                f"{found} prefill workers instead of {best}",
            )
    yield from _times()
    yield from _forwarding()


def _default() -> RatioControl:
    entry = catalogue.lookup("pd-serve")
    assert entry is not None
    built: RatioControl = entry.build()
    return built


def _times() -> Iterator[Check]:
    """The defaults: an evaluation every 30 s, a change at the second that finds a gain; the moving
    average weighs a new time by a tenth."""
    control = _default()
    changes = [control.step(float(now), 1, 5, 2, 4) for now in range(0, 200, 10)]
    yield Check("without measured times no role changes", not any(changes))
    control.record_prefill(10.0)
    control.record_decode(0.1)
    first = next(now for now in range(200, 900) if control.step(float(now), 1, 5, 2, 4))
    yield Check("a role changes at the second evaluation", 230 <= first <= 260, str(first))
    control.record_prefill(20.0)
    average = control.prefill_seconds
    yield Check("the average of 10 s and 20 s", average == 11.0, str(average))
    control = _default()
    control.record_prefill(1.0)
    control.record_decode(2.0)
    # min(2 * 2 / 1, 4 * 2 / 2) / 6 is the best; one more or less serves fewer.
    changes = [control.step(31.0 * now, 2, 4, 2, 2) for now in range(50)]
    yield Check("at the best ratio no role changes", not any(changes))
    # 0.1 s and 0.08 s wish for other directions in turn, and no wish comes twice.
    control, changes = _default(), []
    for number in range(40):
        control.prefill_seconds, control.decode_seconds = (9.0, 1.0) if number % 2 else (1.0, 9.0)
        changes.append(control.step(31.0 * number, 3, 3, 2, 2))
    yield Check("a load that alternates changes no role", not any(changes), str(changes))


def _forwarding() -> Iterator[Check]:
    """A worker that refuses has no queue: the task waits at the proxy, and goes to another one."""
    fleet = Fleet()
    for name in "ab":
        fleet.join(WorkerFacts(name, name, "mixed", "g", (name, 1), 1, 1000), 0.0)
    for number in range(3):
        fleet.submit(Task(number, [1], 5, {"options": {}}), 0.0)
    runs = _runs(fleet)
    yield Check("a task for each worker, the third waits", runs == [("a", 0), ("b", 1)], str(runs))
    fleet.receive("a", {"type": "refused", "task": 0, "attempt": 0}, 0.0)
    yield Check("nothing is forwarded to a busy worker", _runs(fleet) == [])
    ended = {"type": "ended", "task": 1, "attempt": 0, "count": 0}
    fleet.receive("b", ended, 0.0)
    runs = _runs(fleet)
    yield Check("a refused task goes to the worker that is free", runs == [("b", 0)], str(runs))


def _runs(fleet: Fleet) -> list[tuple[str, int]]:
    sent = [one for one in fleet.actions if isinstance(one, SendTo)]
    fleet.actions.clear()
    return [(one.incarnation, one.frame["task"]) for one in sent if one.frame["type"] == "run"]
