"""Oracle test of pd-serve (P/D-Serve, arXiv:2408.08147): the best ratio and the best move between
scenarios by counting what each number of workers can serve, and when a role changes, by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.cluster.control.pd_serve import RatioControl
from anydecode.cluster.control.roles import Group
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
        change = _change(control, 100.0 * period, prefill, decode, MAX_PREFILLS, batch)
        prefill, decode = prefill + change, decode - change
    return prefill


def _change(control: RatioControl, now: float, prefill: int, decode: int, *places: int) -> int:
    """How the number of prefill workers of the only scenario changes."""
    roles = [one.target[1] for one in control.step(now, [Group(prefill, decode)], *places)]
    return roles.count("prefill") - roles.count("decode")


@oracle_test("pd-serve")
def pd_serve() -> Iterator[Check]:
    """Six workers: the ratio that serves most is found from every other one, if one more or one
    less serves 5% more each time."""
    for prompt_ms, answer_ms, batch in ((100, 1000, 4), (300, 200, 2), (50, 900, 8), (7, 7, 2)):
        rates = {n: _served(n, 6 - n, prompt_ms, answer_ms, batch) for n in range(1, 6)}
        best = max(rates, key=lambda n: rates[n])
        for start in range(1, 6):
            control = catalogue.build("pd-serve")
            control.record_prefill(0, prompt_ms / 1000)
            control.record_decode(0, answer_ms / 1000)
            found = _settled(control, start, 6 - start, batch)
            yield Check(
                f"{prompt_ms} and {answer_ms} ms, {batch} answers, from {start}:{6 - start}",
                rates[found] * Fraction(105, 100) >= rates[best],
                f"{found} prefill workers instead of {best}",
            )
    yield from _times()
    yield from _forwarding()
    yield from _scenarios()
    yield from _moves()


def _times() -> Iterator[Check]:
    """The defaults: an evaluation every 30 s, a change at the second that finds a gain; the moving
    average weighs a new time by a tenth."""
    control = catalogue.build("pd-serve")
    changes = [_change(control, float(now), 1, 5, 2, 4) for now in range(0, 200, 10)]
    yield Check("without measured times no role changes", not any(changes))
    control.record_prefill(0, 10.0)
    control.record_decode(0, 0.1)
    first = next(n for n in range(200, 900) if _change(control, float(n), 1, 5, 2, 4))
    yield Check("a role changes at the second evaluation", 230 <= first <= 260, str(first))
    control.record_prefill(0, 20.0)
    average = control.prefill_seconds[0]
    yield Check("the average of 10 s and 20 s", average == 11.0, str(average))
    control = catalogue.build("pd-serve")
    control.record_prefill(0, 1.0)
    control.record_decode(0, 2.0)
    # min(2 * 2 / 1, 4 * 2 / 2) / 6 is the best; one more or less serves fewer.
    changes = [_change(control, 31.0 * now, 2, 4, 2, 2) for now in range(50)]
    yield Check("at the best ratio no role changes", not any(changes))
    # 0.1 s and 0.08 s wish for other directions in turn, and no wish comes twice.
    control, changes = catalogue.build("pd-serve"), []
    for number in range(40):
        times = (9.0, 1.0) if number % 2 else (1.0, 9.0)
        control.prefill_seconds, control.decode_seconds = [times[0]], [times[1]]
        changes.append(_change(control, 31.0 * number, 3, 3, 2, 2))
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


def _scenarios() -> Iterator[Check]:
    """Two scenarios: a task goes to workers of its own, or waits for them and nobody behind it of
    the other scenario does; each scenario has a ratio of its own."""
    fleet = Fleet(catalogue.build("pd-serve", lengths="100"))
    for role in ("prefill", "decode"):
        for name in ("short", "long"):
            fleet.join(WorkerFacts(name + role, name + role, role, "g", (name, 1), 1, 1000), 0.0)
    for number, length in enumerate((100, 100, 101, 1)):
        fleet.submit(Task(number, [1] * length, 5, {"options": {}}), 0.0)
    runs = _runs(fleet)
    expected = [("shortdecode", 0), ("longdecode", 2)]
    yield Check("one task of each scenario, two wait", runs == expected, str(runs))
    ended = {"type": "ended", "task": 2, "attempt": 0, "count": 0}
    fleet.receive("longdecode", ended, 0.0)
    yield Check("short prompts wait for their own worker", _runs(fleet) == [])
    fleet.leave("shortdecode", 0.0)
    runs = _runs(fleet)
    yield Check("or go to another one if it is lost", runs == [("longdecode", 0)], str(runs))

    control, groups = catalogue.build("pd-serve", lengths="100"), [Group(3, 3), Group(3, 3)]
    for scenario, (prompt, answer) in enumerate(((0.1, 2.0), (2.0, 0.1))):
        control.record_prefill(scenario, prompt)
        control.record_decode(scenario, answer)
    groups = _after(control, groups, (0, 0), 4)
    yield Check("two ratios", groups == [Group(1, 5), Group(5, 1)], str(groups))


def _moves() -> Iterator[Check]:
    """Workers move between scenarios until no single move lowers the highest load by 5%."""
    for times, rates, start in (
        ([(100, 1000), (300, 200)], (2, 9), [(4, 4), (1, 1)]),
        ([(100, 1000), (100, 1000)], (1, 1), [(1, 6), (1, 2)]),
        ([(700, 700), (100, 100), (300, 900)], (3, 1, 2), [(1, 1), (3, 3), (2, 4)]),
    ):
        lengths = "/".join(str(100 * (one + 1)) for one in range(len(times) - 1))
        control = catalogue.build("pd-serve", lengths=lengths)
        for scenario, (prompt, answer) in enumerate(times):
            control.record_prefill(scenario, prompt / 1000)
            control.record_decode(scenario, answer / 1000)
        groups = _after(control, [Group(*one) for one in start], rates, 4)
        found = [(one.prefill, one.decode) for one in groups]
        load = _highest_load(times, rates, found, 4)
        better = [
            other
            for other in _single_moves(found)
            if _highest_load(times, rates, other, 4) * Fraction(105, 100) < load
        ]
        is_same = sum(map(sum, found)) == sum(map(sum, start))
        yield Check(f"moves from {start}", is_same and not better, f"{found}, then {better[:1]}")


def _after(
    control: RatioControl, groups: list[Group], rates: Sequence[int], batch: int
) -> list[Group]:
    """The workers of each scenario after many periods with so many arrivals each."""
    for period in range(200):
        for scenario, rate in enumerate(rates):
            for _ in range(rate):
                control.record_arrival(scenario)
        for change in control.step(100.0 * period, groups, MAX_PREFILLS, batch):
            counts = [{"prefill": one.prefill, "decode": one.decode} for one in groups]
            counts[change.source[0]][change.source[1]] -= 1
            counts[change.target[0]][change.target[1]] += 1
            groups = [Group(one["prefill"], one["decode"]) for one in counts]
    return groups


def _highest_load(
    times: Sequence[tuple[int, int]],
    rates: Sequence[int],
    groups: Sequence[tuple[int, int]],
    batch: int,
) -> Fraction:
    return max(
        rate / (_served(*group, *time, batch) * sum(group))
        for rate, time, group in zip(rates, times, groups, strict=True)
    )


def _single_moves(groups: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Every placement after one worker has gone from a group to another."""
    for giver in range(len(groups)):
        for receiver in range(len(groups)):
            for role in (0, 1):
                for next_role in (0, 1):
                    counts = [list(one) for one in groups]
                    counts[giver][role] -= 1
                    counts[receiver][next_role] += 1
                    if giver != receiver and min(map(min, counts)) >= 1:
                        yield [(one[0], one[1]) for one in counts]


def _runs(fleet: Fleet) -> list[tuple[str, int]]:
    sent = [one for one in fleet.actions if isinstance(one, SendTo)]
    fleet.actions.clear()
    return [(one.incarnation, one.frame["task"]) for one in sent if one.frame["type"] == "run"]
