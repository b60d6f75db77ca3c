"""Oracle test of xllm (xLLM, arXiv:2510.14686). It checks the rules for workers and roles in whole
numbers of nanoseconds, on random fleets and on examples computed by hand, and changes of roles in a
fleet and in a simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.cluster.control.roles import TaskNeeds, TaskPlacement, WorkerLoad
from anydecode.cluster.control.xllm import SloControl
from anydecode.cluster.fleet import Fleet, Task, WorkerFacts
from anydecode.cluster.routing import CachedBlocks
from anydecode.cluster.simulator.simulation import Arrival, WorkerPlan, simulate
from anydecode.memory.prefix import BLOCK, block_digests
from anydecode.scoring.cost import CostTable

_NANO = 10**9
_TTFT, _TPOT = 500_000_370, 40_000_370  # which no sum of the times below reaches


def _prompt_time(rows: int) -> int:
    return 20_000_000 + 1_000_000 * rows + 1_000 * rows * rows


def _token_time(answers: int, positions: int) -> int:
    return 10_000_000 + 1_000_000 * answers + 10_000 * positions


def _control(**parameters: Any) -> SloControl:
    """A control that knows the times above."""
    control: SloControl = catalogue.build("xllm", **parameters)
    for number in range(12):
        rows, answers, positions = 7 + 31 * number, 1 + number % 4, 50 + 67 * number
        control.record_prompt(rows, _prompt_time(rows) / _NANO)
        control.record_token(answers, positions, _token_time(answers, positions) / _NANO)
    return control


@oracle_test("xllm")
def xllm() -> Iterator[Check]:
    yield from _predictions()
    yield from _placements()
    yield from _scores()
    yield from _offline()
    yield from _changes_of_roles()
    yield from _drained()
    yield from _observed()
    yield _offline_order()
    yield _offline_at_prefill()
    yield from _index()
    yield from _simulated()


def _predictions() -> Iterator[Check]:
    """Predicted times against least squares by the normal equations, in exact fractions."""
    generator, control = random.Random(1), _control()
    points = []
    for _ in range(300):
        rows, micro = generator.randrange(1, 500), generator.randrange(10**4, 10**6)
        control.record_prompt(rows, micro / 10**6)
        points.append((rows, micro))
    solution = _least_squares(points[-256:])
    for rows in (1, 100, 1000):
        expected = max(0.0, float(sum(c * rows**k for k, c in enumerate(solution)) / 10**6))
        found = control.prompts.seconds((1.0, rows, rows**2))
        is_near = abs(found - expected) <= 1e-6 * max(expected, 1.0)
        yield Check(f"the predicted time of {rows} rows", is_near, f"{found} for {expected}")
    fresh = SloControl()
    place = fresh.place(0.0, TaskNeeds(10), [_worker("d", "decode")])
    yield Check("without observations there is no prediction", place is None, str(place))
    for rows in range(1, 13):
        fresh.record_prompt(rows, 0.02 - 0.001 * rows)
    found = fresh.prompts.seconds((1.0, 100, 100**2))
    yield Check("no time is below 0", found == 0, str(found))
    known = _control().tokens.seconds((1.0, 20, 3000)) * _NANO
    yield Check("the time between tokens", abs(known - _token_time(20, 3000)) < 10, str(known))


def _least_squares(points: Sequence[tuple[int, int]]) -> list[Fraction]:
    """The coefficients of 1, x and x², by Gauss-Jordan elimination."""
    rows = [
        [Fraction(sum(x ** (i + j) for x, _ in points)) for j in range(3)]
        + [Fraction(sum(y * x**i for x, y in points))]
        for i in range(3)
    ]
    for i in range(3):
        rows[i] = [one / rows[i][i] for one in rows[i]]
        for j in range(3):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[3] for row in rows]


def _worker(name: str, role: str, **facts: Any) -> WorkerLoad:
    return WorkerLoad(name, role, **{"num_uncached": 100, **facts})


def _placements() -> Iterator[Check]:
    """Random fleets, in which every rule decides often."""
    generator, differ, seen = random.Random(7), list[str](), set[str]()
    for _ in range(3000):
        workers = [_random_worker(generator, number) for number in range(generator.randint(1, 6))]
        offline = generator.random() < 0.2
        task = TaskNeeds(generator.randrange(1, 800), generator.randrange(30) / 50, offline)
        control = _control(ttft=_TTFT / _NANO, tpot=_TPOT / _NANO)
        found, expected = control.place(10.0, task, workers), _expected(task, workers, seen)
        if found != expected:
            differ.append(f"{found} for {expected}, {task}, {workers}")
    yield Check("the workers of random fleets", not differ, f"{len(differ)}: {differ[:1]}")
    # The prompt of 100 tokens takes 130 ms: with a wait of 0.86 s it is within the default limit of
    # one second, with 0.88 s it is not.
    workers = [_worker("p", "prefill"), *(_worker(n, "decode", num_uncached=50) for n in "de")]
    for waited, place in ((0.86, TaskPlacement("p", is_prefill=True)), (0.88, TaskPlacement("d"))):
        found = _control().place(0.0, TaskNeeds(100, waited), workers)
        yield Check(f"the default limit, {waited} s waited", found == place, str(found))
    rules = {"within", "above", "light", "flip", "no flip", "prefill", "wait"}
    rules |= {"offline waits", "offline at a prefill worker"}
    yield Check("every rule decides", seen >= rules, str(seen))


def _random_worker(generator: random.Random, number: int) -> WorkerLoad:
    role = generator.choice(("prefill", "prefill", "decode", "decode", "mixed"))
    num_prompts = (
        generator.choice((0, 0, 1, 2)) if role != "decode" else generator.choice((0, 0, 1))
    )
    answers = generator.choice((0, 3, 4, 9) if role == "prefill" else (0, 3, 9, 16))
    return _worker(
        f"w{number}",
        role,
        group=generator.choice("aaab"),
        prompts=tuple(generator.randrange(1, 400) for _ in range(num_prompts)),
        num_answers=answers,
        num_positions=answers * generator.randrange(1, 150),
        usage=generator.randrange(1, 20) / 19,
        num_uncached=generator.randrange(1, 600),
        needs_prefill=generator.random() < 0.8,
        can_prefill=generator.random() < 0.7,
        can_decode=generator.random() < 0.8,
    )


def _expected(task: TaskNeeds, workers: list[WorkerLoad], seen: set[str]) -> TaskPlacement | None:
    decoders = [one for one in workers if one.role in ("decode", "mixed")]
    prefillers = [one for one in workers if one.role == "prefill"]
    if not decoders:
        return None

    def after(one: WorkerLoad) -> int:
        return _token_time(one.num_answers + 1, one.num_positions + task.length)

    def wait(one: WorkerLoad) -> int:
        return sum(map(_prompt_time, one.prompts)) + _prompt_time(one.num_uncached)

    flip = None
    is_any_within = any(one.can_decode and after(one) <= _TPOT for one in decoders)
    count = len(prefillers)
    if not (task.is_offline or is_any_within) and count > 1:
        is_rested = count * sum(map(wait, prefillers)) < _TTFT * (count - 1) * count
        if is_rested or len(decoders) < count:
            flip = sorted(prefillers, key=wait)[0].name
        seen.add("flip" if flip else "no flip")
    possible = [one for one in decoders if one.can_decode]
    if task.is_offline:
        possible = [one for one in possible if _has_room(one, after(one))]
        calm = [
            (wait(one), number)
            for number, one in enumerate(workers)
            if one.role == "prefill"
            and one.prompts == ()
            and one.can_decode
            and one.num_answers <= 3  # by default up to 4 offline answers
        ]
        if calm and not possible:
            seen.add("offline at a prefill worker")
            return TaskPlacement(workers[min(calm)[1]].name, False, None)
        seen.update(() if possible else ("offline waits",))
    if not possible:
        return TaskPlacement(None, False, flip)
    best = next((one for one in possible if after(one) <= _TPOT), None)
    seen.add("within" if best else "above")
    best = best or sorted(possible, key=after)[0]
    near = [one for one in prefillers if one.group == best.group]
    if not best.needs_prefill or not near:
        return TaskPlacement(best.name, False, flip)
    soonest = sorted(near, key=wait)[0]
    if Fraction(task.waited) * _NANO + wait(soonest) > _TTFT:
        share = Fraction(len(decoders) - 1, len(decoders))
        light = [
            one
            for one in possible
            if _token_time(one.num_answers, one.num_positions) < share * _TPOT
            and wait(one) < wait(soonest)
        ]
        if light:
            seen.add("light")
            return TaskPlacement(sorted(light, key=wait)[0].name, False, flip)
    ready = sorted((one for one in near if one.can_prefill and one.name != flip), key=wait)
    seen.add("prefill" if ready else "wait")
    return TaskPlacement(ready[0].name, True, flip) if ready else TaskPlacement(None, False, flip)


def _has_room(worker: WorkerLoad, after: int) -> bool:
    """Whether an offline task may go to a worker."""
    if worker.num_answers == 0 and not worker.prompts:
        return True
    present = _token_time(worker.num_answers, worker.num_positions)
    return worker.usage < 0.9 and 10 * present < 9 * _TPOT and 100 * after <= 98 * _TPOT


def _scores() -> Iterator[Check]:
    """By cached blocks: 3 of 4 blocks, 1 of 2 waiting prompts and a tenth of the cache in use are
    0.75 - 0.5 - 0.1; the others have 1 - 1 - 0.1 and 0 - 0 - 0.2."""
    control, task = SloControl(policy="cache"), TaskNeeds(10)
    workers = [
        _worker("none", "decode", usage=0.2),
        _worker("most", "decode", num_matched=4, prompts=(9, 9), usage=0.1),
        _worker("some", "decode", num_matched=3, prompts=(9,), usage=0.1),
    ]
    workers = [replace(one, needs_prefill=False) for one in workers]
    found = control.place(0.0, task, workers)
    yield Check("the best score of three", found == TaskPlacement("some"), str(found))
    generator, differ = random.Random(3), list[str]()
    for _ in range(300):
        workers = [
            _worker(
                str(number),
                "decode",
                num_matched=generator.choice((0, 0, 3, 7, 11)),
                prompts=(1,) * generator.randrange(4),
                usage=generator.randrange(64) / 64,
                needs_prefill=False,
            )
            for number in range(4)
        ]
        blocks = max(1, *(one.num_matched for one in workers))
        prompts = max(1, *(len(one.prompts) for one in workers))
        scores = [
            Fraction(one.num_matched, blocks)
            - Fraction(one.usage)
            - Fraction(len(one.prompts), prompts)
            for one in workers
        ]
        near = {
            one.name for one, score in zip(workers, scores, strict=True) if score == max(scores)
        }
        found = control.place(0.0, task, workers)
        if found is None or found.worker not in near:
            differ.append(f"{found} for {near}")
    yield Check("the best score of random workers", not differ, f"{len(differ)}: {differ[:1]}")


def _offline() -> Iterator[Check]:
    """With the default limit of 50 ms, an offline task goes to a worker if the predicted time
    between tokens is less than 45 ms without it and at most 49 ms with it, and less than 90% of the
    worker's cache is in use. The offline task that goes next is the one whose length is nearest to
    the solution of 49 = 10 + 11 + 0.01 * (1000 + length)."""
    control = _control()
    busy = _worker(
        "d", "decode", num_answers=10, num_positions=1000, usage=0.89, needs_prefill=False
    )
    for name, worker, length, expected in (
        ("up to 49 ms", busy, 1799, "d"),
        ("above 49 ms", busy, 1801, None),
        ("90% of the cache in use", replace(busy, usage=0.91), 10, None),
        ("45 ms already", replace(busy, num_positions=2501), 1, None),
        ("almost 45 ms", replace(busy, num_positions=2499), 1, "d"),
        ("too long, and nothing else runs", replace(busy, num_answers=0), 9000, "d"),
    ):
        found = control.place(0.0, TaskNeeds(length, is_offline=True), [worker])
        yield Check(f"an offline task, {name}", found == TaskPlacement(expected), str(found))
    found = control.place(0.0, TaskNeeds(9000), [busy])
    yield Check("another task goes there all the same", found == TaskPlacement("d"), str(found))
    preferred = control.preferred_length([busy, replace(busy, num_answers=11)])
    yield Check("the preferred length", preferred in (1799, 1800), str(preferred))


def _changes_of_roles() -> Iterator[Check]:
    """With the default period there is at most one change in 5 seconds under any load, and each
    role keeps at least one worker."""
    full = [_worker(f"d{n}", "decode", num_answers=60, num_positions=6000) for n in range(2)]
    prefill = [_worker(f"p{n}", "prefill") for n in range(3)]
    control, task = _control(), TaskNeeds(10)
    times = [
        number / 10
        for number in range(200)
        if (found := control.place(number / 10, task, [*prefill, *full])) and found.flip
    ]
    yield Check("one change of roles in 5 seconds", times == [0.0, 5.0, 10.0, 15.0], str(times))
    found = _control().place(0.0, task, [prefill[0], *full])
    yield Check("the last prefill worker stays", found is not None and found.flip is None)
    idle = [_worker("d0", "decode"), _worker("d1", "decode", num_answers=1)]
    waiting = [_worker("p0", "prefill", prompts=(100,))]
    for name, workers, expected in (
        ("while prompts wait", [*waiting, *idle], [5.0, 10.0, 15.0]),
        ("without prompts", [_worker("p0", "prefill"), *idle], []),
        ("the last one", [*waiting, idle[0]], []),
    ):
        control = _control()
        times = [n / 2 for n in range(40) if control.idle_flip(n / 2, workers) == "d0"]
        yield Check(f"a decode worker without tasks, {name}", times == expected, str(times))
    # An idle second in three: never for as long as 5 seconds.
    control, flips = _control(), list[Any]()
    for second in range(60):
        load = replace(idle[0], num_answers=int(second % 3 > 0))
        flips.append(control.idle_flip(float(second), [*waiting, load, idle[1]]))
    yield Check("a short pause changes no role", not any(flips))


def _drained() -> Iterator[Check]:
    """When no decode worker is within the limit, the prefill worker with less to do becomes a
    decode worker. It first computes the prompts that it has, and gets no new task until then."""
    control = _control(tpot=1000.0)
    fleet = Fleet(control)
    for name in ("prefill-1", "prefill-2", "decode"):
        role = name.partition("-")[0]
        fleet.join(WorkerFacts(name, name, role, "g", (name, 1), 8, 10_000), 0.0)
    for number, blocks in enumerate((9, 5)):
        fleet.submit(_task(number, blocks), 0.0)
    control.tpot = 0.001
    for number in (2, 3, 4):
        fleet.submit(_task(number, 0), 0.0)
    fleet.submit(_task(5, 5), 0.0)
    places = [one.worker for one in fleet.tasks.values()]
    expected = ["prefill-1", "prefill-2", *["decode"] * 3, "prefill-1"]
    yield Check("a worker that changes gets no task", places == expected, str(places))
    roles = [[one.role for one in fleet.members.values()]]
    for task in (0, 1):
        offered = {"type": "offered", "task": task, "attempt": 0, "is_kept": True}
        fleet.receive(f"prefill-{1 + task}", offered, 1.0)
        fleet.tick(1.0)
        roles.append([one.role for one in fleet.members.values()])
    before = ["prefill", "prefill", "decode"]
    expected_roles = [before, before, ["prefill", "decode", "decode"]]
    yield Check("it changes when its prompts are computed", roles == expected_roles, str(roles))
    changes = fleet.counts["role_changes"]
    yield Check("one change is counted", changes == 1, str(changes))


def _task(number: int, num_blocks: int) -> Task:
    prompt = [number] * (BLOCK * num_blocks + 1)
    return Task(number, prompt, 5, {"options": {}}, block_digests("", prompt[:-1]))


class _Recorder(SloControl):
    """Records the calls of a fleet, with the tasks of each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self.reported: list[Any] = []

    def place(
        self, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]
    ) -> TaskPlacement | None:
        loads = [
            (one.name, one.prompts, one.num_answers, one.num_positions, one.usage)
            for one in workers
        ]
        self.asked.append((now, task, loads))
        return None

    def record_prompt(self, num_rows: int, seconds: float) -> None:
        self.reported.append((num_rows, seconds))

    def record_token(self, num_answers: int, num_positions: int, seconds: float) -> None:
        self.reported.append((num_answers, num_positions, seconds))


def _observed() -> Iterator[Check]:
    """What a fleet passes to its control. Prompts of 145, 81 and 97 tokens, with answers of up to 5
    tokens, arrive 0.5 seconds apart. The first two go to the prefill worker, and the third waits.
    """
    control = _Recorder()
    fleet = Fleet(control)
    for name in ("prefill", "decode"):
        fleet.join(WorkerFacts(name, name, name, "g", (name, 1), 8, 1000), 0.0)
    for number, blocks in enumerate((9, 5, 6)):
        fleet.submit(_task(number, blocks), number / 2)
    expected = [("prefill", (145, 81), 0, 0, 0.236), ("decode", (), 0, 0, 0.0)]
    found = control.asked[-1]
    is_right = found == (1.0, TaskNeeds(97), expected)
    yield Check("a prompt that waits for a prefill worker", is_right, str(found))
    control.asked.clear()
    for number, now in ((0, 2.0), (1, 2.5)):
        offered = {"type": "offered", "task": number, "attempt": 0, "is_kept": True}
        fleet.receive("prefill", offered, now)
    waited = [(now, task.length, task.waited) for now, task, _ in control.asked]
    all_waited = [(2.0, 145, 2.0), (2.0, 97, 1.0), (2.5, 81, 2.0)]
    yield Check("the time for which tasks have waited", waited == all_waited, str(waited))
    for number, start, now in ((0, 0, 3.0), (1, 0, 3.25), (0, 1, 3.5), (1, 1, 4.0)):
        tokens = {"task": number, "attempt": 1, "start": start, "tokens": [7], "logprobs": None}
        fleet.receive("decode", {"type": "tokens", **tokens}, now)
    # The second prompt was begun when the first was ready.
    times: list[Any] = [(145, 2.0), (81, 0.5), (2, 228, 0.5), (2, 229, 0.75)]
    yield Check("the reported times", control.reported == times, str(control.reported))
    for name in ("prefill", "decode"):
        beat = {"type": "beat", "seen": 0, "tasks": [], "leases": [], "passes": 0}
        fleet.receive(name, beat, 4.0)
    fleet.submit(_task(3, 0), 4.0)
    found = control.asked[-1][2]
    expected = [("prefill", (97,), 0, 0, 0.102), ("decode", (), 2, 230, 0.236)]
    yield Check("the answers of a decode worker", found == expected, str(found))


def _offline_order() -> Check:
    """Offline tasks of 17, 129 and 241 tokens wait when a worker joins. It prefers a
    first task of 125 tokens, since 11 ms + 125 * 0.01 ms = 12.25 ms is 98% of the limit of 12.5 ms.
    With one offline task it is above 90% of the limit, and gets no other offline task."""
    fleet = Fleet(_control(tpot=0.0125))
    for number, blocks in enumerate((1, 8, 15)):
        fleet.submit(replace(_task(number, blocks), priority=1), 0.0)
    fleet.join(WorkerFacts("d", "d", "decode", "g", ("d", 1), 8, 10_000), 1.0)
    fleet.submit(_task(3, 1), 2.0)
    begun = list(fleet.members["d"].tasks)
    return Check("the offline task of the nearest length begins", begun == [1, 3], str(begun))


def _offline_at_prefill() -> Check:
    """No decode worker takes offline tasks, so that the prefill worker runs four of the six. It
    still gets two prompts of other tasks at a time."""
    control = _control(tpot=0.011)
    fleet = Fleet(control)
    for name in ("prefill", "decode"):
        fleet.join(WorkerFacts(name, name, name, "g", (name, 1), 8, 100_000), 0.0)
    fleet.submit(_task(0, 0), 0.0)  # after which the decode worker is above 90% of its limit
    for number in range(1, 7):
        fleet.submit(replace(_task(number, 1), priority=1), 0.0)
        if fleet.tasks[number].worker is not None:
            tokens = {"task": number, "attempt": 0, "start": 0, "tokens": [7], "logprobs": None}
            fleet.receive("prefill", {"type": "tokens", **tokens}, 0.0)
            fleet.tick(0.0)
    for number in (7, 8, 9):
        fleet.submit(_task(number, 5), 0.0)
    places = [fleet.tasks[number].worker for number in range(10)]
    expected = ["decode", *["prefill"] * 4, None, None, *["prefill"] * 2, None]
    return Check("offline answers at a prefill worker", places == expected, str(places))


def _index() -> Iterator[Check]:
    """A block that is missing ends the match, although later ones are there; another tenant's
    blocks of the same tokens are others."""
    tokens = list(range(BLOCK * 5))
    digests, cached = block_digests("", tokens), CachedBlocks(10_000)
    cached.add([digests[0], digests[1], digests[3], digests[4]])
    found = cached.num_matched(digests)
    yield Check("a hole ends the match", found == 2, str(found))
    found = cached.num_matched(block_digests("other", tokens))
    yield Check("another namespace has no match", found == 0, str(found))


def _simulated() -> Iterator[Check]:
    """Simulated workers with long prompts and long answers in turn. Roles change, but not more
    often than the load does, and every request is answered. In a fleet whose workers are within all
    limits, no role changes."""
    costs = CostTable({0: {1: 0.010, 2: 0.0105}})
    workers = [WorkerPlan(role, costs) for role in ("prefill", "prefill", "prefill", "decode")]
    arrivals = [
        *(_arrival(0.5 * number, 200, 10, number) for number in range(20)),
        *(_arrival(10 + 0.1 * number, 80, 100, number) for number in range(30)),
        *(_arrival(20 + 0.5 * number, 200, 10, number) for number in range(20)),
    ]
    for tpot, most, least in ((0.015, 3, 1), (10.0, 0, 0)):
        result = simulate(arrivals, workers, control=SloControl(tpot=tpot))
        changes = result.counts["role_changes"]
        name = f"changes of roles, {tpot:g} s between tokens"
        yield Check(name, least <= changes <= most, str(changes))
        numbers = [len(one.token_times) for one in result.served if one.failure is None]
        expected = [one.num_tokens for one in arrivals]
        yield Check(f"every answer is complete, {tpot:g} s", numbers == expected)


def _arrival(time: float, length: int, num_tokens: int, seed: int) -> Arrival:
    return Arrival(time, [(7 * seed + 3 * one) % 251 for one in range(length)], num_tokens)
