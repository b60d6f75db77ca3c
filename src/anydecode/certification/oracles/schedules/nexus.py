"""Oracle test of nexus (Nexus, arXiv:2507.06608): the prompts' share of a pass and the order of
prompts, by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import product
from time import monotonic
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, Restarts, oracle_test
from anydecode.certification.oracles.schedules.passes import LONG, passes, rows_of, same_text
from anydecode.certification.tiny import tiny_model
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.engine.schedules.nexus import chosen_share
from anydecode.models.scripted import ByteTokenizer


@oracle_test("nexus")
def nexus() -> Iterator[Check]:
    """Shares of 10 to 100 rows beside one decode. Time between tokens: 1 + n / 10, best 2. Prefill
    of 200 rows: ceil(200 / n) times that, best 22 at 100; 40, 30, 28, 25 for 10 to 40."""
    inter_token = {share: 0.9 + 0.1 * (1 + share) for share in range(10, 101, 10)}
    prefill = {share: -(-200 // share) * seconds for share, seconds in inter_token.items()}
    for slack, expected in ((1.0, 10), (1.6, 20), (2.6, 40), (9.0, 100)):
        found = chosen_share(inter_token, prefill, decode_first=False, slack=slack)
        yield Check(f"prefill first, beta {slack:g}", found == expected, str(found))
    for slack, expected in ((1.0, 100), (1.2, 40), (1.3, 30), (1.4, 20), (2.0, 10)):
        found = chosen_share(inter_token, prefill, decode_first=True, slack=slack)
        yield Check(f"decode first, alpha {slack:g}", found == expected, str(found))
    # A pass without decodes has 100 rows.
    rows = rows_of(passes("nexus:row_budget=100,steps=10,beta=1.6", [5, 170, 150], tokens=12))
    first = [{0: 5, 2: 95}, *[{0: 1, 2: 20}] * 2, {0: 1, 2: 15, 1: 5}]
    yield Check("the shortest prompt first, in shares of 20", rows[:4] == first, str(rows))
    speaking = [one for one in rows if 0 in one]
    yield Check("a decoding request is in every pass", rows[:12] == speaking)
    for ageing, request in ((0, 2), (1000, 1)):
        late = f"nexus:row_budget=20,steps=2,ageing={ageing}"
        rows = rows_of(passes(late, [5, 150, 70], tokens=1, running=2))
        yield Check(
            f"ageing {ageing}: {request} goes first", list(rows[1]) == [request], str(rows[1])
        )
    # 200 rows remain after the first pass, then 160: 32, 24, 24, 20 for 10 to 40, best 18 at 80.
    full = passes("nexus:row_budget=100,steps=10,beta=1,full=-1,alpha=1.2", [5, 295], tokens=3)
    counts = [one.get(1) for one in rows_of(full)][:3]
    yield Check("a full cache gives decodes priority", counts == [95, 40, 40], str(counts))
    yield same_text("nexus:row_budget=100,steps=10")
    yield from _two_streams()
    yield from _split_of_threads()
    yield from _text_of_two_streams()
    yield from _default_checks()
    yield _two_teams()


def _two_streams() -> Iterator[Check]:
    """One request decodes when a prompt of 100 tokens arrives. The prompt's pass ends after three
    passes of the decode; the first of them begins when the prompt's pass has begun. Either waits 20
    seconds at most."""
    with _open(threads=3) as llm:
        runner, threads = llm.engine.runners["target"], list[tuple[str, int, int]]()
        prompts = runner.streams[-1]
        decode, prompt = (
            llm.request([97 + number] * length, max_tokens=9, **_OPTIONS).jobs[0]
            for number, length in enumerate((5, 100))
        )
        has_begun, in_time = threading.Event(), list[bool]()
        decodes = threading.Semaphore(0)

        def prompts_run(plan: Any, run: Any = prompts.run) -> Any:
            output = _recorded(threads, "prompt", prompts, plan, run)
            if prompt in llm.engine.running:
                has_begun.set()
                in_time.append(all(decodes.acquire(timeout=20) for _ in range(3)))
            return output

        def decodes_run(plan: Any, run: Any = runner.run) -> Any:
            if prompt in llm.engine.running and not (has_begun.is_set() or in_time):
                in_time.append(has_begun.wait(20))
            output = _recorded(threads, "decode", runner, plan, run)
            decodes.release()
            return output

        runner.run = decodes_run  # type: ignore[method-assign]
        if prompts is not runner:
            prompts.run = prompts_run  # type: ignore[method-assign]
        llm.engine.submit(decode)
        llm.engine.step()
        llm.engine.submit(prompt)
        while llm.engine.has_work:
            llm.engine.step()
    name = "a prompt and decodes are computed at the same time"
    yield Check(name, in_time == [True, True], str(in_time))
    expected = {("prompt", 5, 3), ("prompt", 100, 2), ("decode", 1, 1)}
    yield Check("each has threads of its own", expected <= set(threads), str(set(threads)))
    yield _slots_in_use()


def _split_of_threads() -> Iterator[Check]:
    """Eight threads. One row, which is bound by memory, takes 12 seconds with one thread, 6 with
    two, and 4 with three or more; two rows take 24, 12, 8, and 6 with four or more. A prompt of 100
    tokens takes 840 divided by its threads, best 120 with seven."""

    def cost(rows: int, context: int, threads: int) -> float:
        return 12 * rows / min(threads, 2 + rows) if rows < 3 else 8.4 * rows / threads

    for options, expected in (
        ("beta=1.3", 3),  # 5.2 seconds between tokens
        ("beta=1.5", 2),
        ("beta=3", 1),
        ("full=-1,alpha=1.3", 2),  # 156 seconds of prefill
        ("full=-1,alpha=1.4", 3),
        ("full=-1,alpha=7", 7),
    ):
        found = _threads_beside(f"nexus:{options}", cost, [5, 100])
        wanted = {("decode", 1, expected), ("prompt", 100, 8 - expected)}
        yield Check(f"the split of eight threads, {options}", found == wanted, str(found))
    found = _threads_beside("nexus", None, [5, 100])
    wanted = {("decode", 1, 1), ("prompt", 100, 7)}
    yield Check("decodes have one thread where costs are not measured", found == wanted, str(found))
    # Two rows need four threads for 1.3 times 6 seconds: four for prompts are 20 % less than five.
    for change, expected in ((0.15, 4), (0.25, 3)):
        found = _threads_beside(f"nexus:change={change}", cost, [5, 5, 100])
        wanted = {("decode", 1, 3), ("prompt", 5, 5)}
        wanted |= {("decode", 2, expected), ("prompt", 100, 8 - expected)}
        yield Check(f"a change of the split by {change:g}", found == wanted, str(found))


def _two_teams() -> Check:
    """Four threads, two for each stream. A prompt of 3000 tokens takes hundreds of times as long as
    a pass of one row: five such passes end while it is computed. It is computed again until that is
    so, for 20 seconds at most, since other processes may need the cores."""
    order, num_beside, has_begun = list[tuple[str, int]](), list[int](), threading.Event()
    model = tiny_model(threads=4, layers=12, positions=4096)
    with LLM(
        model,
        tokenizer=ByteTokenizer(),
        schedule="nexus:row_budget=4096",
        row_budget=4096,
        cache_positions=4096,
    ) as llm:
        main = llm.engine.runners["target"]
        main.thread_cost = lambda rows, context, threads: rows / min(threads, 2)

        def run(runner: ModelRunner, plan: Plan, run: Any) -> Any:
            threads = runner.model.executor.threads_in_use  # type: ignore[attr-defined]
            if len(plan.rows) == 3000:
                end = monotonic() + 20
                has_begun.set()
                while not num_beside or num_beside[-1] < 5 and monotonic() < end:
                    num_before = len(order)
                    output = run(plan)
                    num_beside.append(len(order) - num_before)
                order.append(("prompt", threads))
                return output
            if not plan.is_alone:
                has_begun.wait(20)
            output = run(plan)
            if not plan.is_alone:
                order.append(("decode", threads))
            return output

        for runner in main.streams:
            runner.run = partial(run, runner, run=runner.run)  # type: ignore[method-assign]
        for length, max_tokens in ((5, 1000), (3000, 1)):
            options = {**_OPTIONS, "max_tokens": max_tokens}
            llm.engine.submit(llm.request([97] * length, **options).jobs[0])
            llm.engine.step()
        while ("prompt", 2) not in order and llm.engine.has_work:
            llm.engine.step()
    name = "passes of two threads each run at the same time"
    is_split = set(order) == {("decode", 2), ("prompt", 2)}
    is_beside = bool(num_beside) and num_beside[-1] >= 5
    return Check(name, is_split and is_beside, f"{num_beside} passes, {set(order)}")


class _Clock:
    """A prompt takes as long as ten passes of decodes."""

    def seconds(self, runner: ModelRunner, plan: Plan) -> float:
        return 1.0 if runner is runner.main else 10.0


def _threads_beside(schedule: str, cost: Any, lengths: list[int]) -> set[tuple[str, int, int]]:
    """The passes that do not run alone, with their threads, of prompts that arrive one after
    another."""
    threads = list[tuple[str, int, int]]()
    with _open(8, schedule) as llm:
        main = llm.engine.runners["target"]
        main.thread_cost, llm.engine.clock = cost, _Clock()

        def recorded(name: str, runner: Any, run: Any, plan: Any) -> Any:
            return _recorded([] if plan.is_alone else threads, name, runner, plan, run)

        for name, runner in zip(("decode", "prompt"), main.streams, strict=True):
            runner.run = partial(recorded, name, runner, runner.run)  # type: ignore[method-assign]
        for length in lengths:
            job = llm.request([97] * length, max_tokens=40, **_OPTIONS).jobs[0]
            llm.engine.submit(job)
            while not job.sequence.tokens:
                llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
    return set(threads)


def _slots_in_use() -> Check:
    """A prompt is cancelled while its pass runs beside decodes. Only if its slots are freed does
    the pass end within half a second."""
    with _open(threads=2) as llm:
        prompts, has_released = llm.engine.runners["target"].streams[-1], threading.Event()
        decode, prompt = (
            llm.request([97] * length, max_tokens=50, **_OPTIONS).jobs[0] for length in (5, 100)
        )
        ended, ended_before = list[int](), list[bool]()

        def held(plan: Any, run: Any = prompts.run) -> Any:
            if len(plan.rows) == 100:
                has_released.wait(0.5)
            output = run(plan)
            ended.append(len(plan.rows))
            return output

        release = prompt.sequence.release

        def released() -> None:
            ended_before.append(100 in ended)
            has_released.set()
            release()

        prompts.run, prompt.sequence.release = held, released  # type: ignore[method-assign]
        llm.engine.submit(decode)
        llm.engine.step()
        llm.engine.submit(prompt)
        llm.engine.step()
        llm.engine.cancel(prompt)
        while llm.engine.has_work:
            llm.engine.step()
        llm.engine.check_integrity()
    return Check("slots are freed after the pass that writes them", ended_before == [True])


_OPTIONS: dict[str, Any] = {"decoder": "autoregressive", "ignore_eos": True}


def _open(threads: int, schedule: str = "nexus", **options: Any) -> LLM:
    """A transformer with so many threads."""
    model = tiny_model(threads=threads, layers=3)
    return LLM(model, tokenizer=ByteTokenizer(), schedule=schedule, **options)


def _recorded(threads: list[Any], name: str, runner: Any, plan: Any, run: Any) -> Any:
    """Run a pass, and record its stream, its rows and its threads."""
    output = run(plan)
    threads.append((name, len(plan.rows), runner.model.executor.threads_in_use))
    return output


def _text_of_two_streams() -> Iterator[Check]:
    """Prompts and decodes in two streams, with restarts, in a cache that is too small for all: with
    threads, and in the order of a clock, by which it is known how many prompts run beside decodes.
    """
    prompts, num_beside = [*LONG, *PROMPTS], list[int]()
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with LLM(tiny_model(layers=3), tokenizer=ByteTokenizer()) as llm:
        expected = [one.tokens for one in llm.generate(prompts, **options)]
    for decoder, clock in product(("autoregressive", "prompt-lookup"), (None, _Clock())):
        with _open(2, cache_positions=700) as llm, Restarts(llm.engine, seed=5):
            stream, count = llm.engine.runners["target"].streams[-1], list[bool]()
            llm.engine.clock = clock

            def counted(plan: Any, run: Any = stream.run, count: list[bool] = count) -> Any:
                count.append(not plan.is_alone)
                return run(plan)

            stream.run = counted  # type: ignore[method-assign]
            answers = llm.generate(prompts, decoder=decoder, **options)
            llm.engine.check_integrity()
        tokens = [one.tokens for one in answers]
        order = "threads" if clock is None else "a clock"
        name = f"the text of two streams is that of one, {decoder}, by {order}"
        yield Check(name, tokens == expected)
        num_beside += [] if clock is None else [sum(count)]
    yield Check("prompts have run beside decodes", sum(num_beside) > 5, str(num_beside))


def _default_checks() -> Iterator[Check]:
    """The default parameters: shares of 16, 32, ..., 512 rows; alpha and beta 1.3; a change of 5 %;
    a cache full at 70 %; an ageing of 16 rows per pass. With beta, n decode rows allow shares up to
    23.5 + 0.3 n. A pass without decodes has 512 rows."""

    def rows(lengths: list[int], schedule: str = "nexus", **options: Any) -> list[dict[int, int]]:
        return rows_of(passes(schedule, lengths, **{"tokens": 1, **options}))

    def shares(of: int, all_rows: list[dict[int, int]], count: int) -> list[int | None]:
        return [one.get(of) for one in all_rows[:count]]

    for decodes, share in ((29, 32), (28, 16)):
        found = shares(decodes, rows([5] * decodes + [800], tokens=12), 4)
        expected_shares = [512 - 5 * decodes, share, share, share]
        name = f"the default beta, {decodes} decodes"
        yield Check(name, found == expected_shares, str(found))
    actual = rows([600, 64], tokens=2)
    expected = [{0: 448, 1: 64}, {0: 16, 1: 1}, {0: 136}, {0: 1}]
    yield Check("the default row budget", actual == expected, str(actual))
    # With beta = 12, 5 decodes allow 346 rows, thus 336; 6 allow 357, thus 352, which is less than
    # 5 % more; 8 allow 379, thus 368, which is less than 10 % more. The last three requests arrive
    # when 5 and 6 requests decode.
    arrivals = [0] * 6 + [1, 2, 2]
    actual = rows([3000, *[2] * 8], "nexus:beta=12", tokens=20, arrivals=arrivals)
    totals = [sum(one.values()) for one in actual[:4]]
    yield Check("the default change", totals == [512, 336 + 5, 336 + 6, 368 + 8], str(totals))
    # After the first pass, 512 of 1000 positions are in use; 12 passes later 512 + 17 * 12, and 98
    # rows remain. One pass takes 12.2, two take 14.8, four take 16.8. The last 34 rows take 5.8 in
    # one pass, 7.8 in three.
    found = shares(1, rows([2, 800], tokens=60, cache_positions=1000), 16)
    expected_shares = [510, *[16] * 12, 64, 34, 1]
    yield Check("the default alpha and full", found == expected_shares, str(found))
    # When request 3 arrives, 366 rows of request 2 remain, which has waited for 3 passes.
    for length, first in ((366 - 3 * 16 - 1, 3), (366 - 3 * 16 + 1, 2)):
        late = rows([5, 5, 900, length], running=3, max_tokens=[60, 3, 1, 1])[3]
        yield Check(f"the default ageing, {length} rows", late == {0: 1, first: 16}, str(late))
