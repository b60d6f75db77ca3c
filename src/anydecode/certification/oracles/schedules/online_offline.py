"""Oracle test of online-offline (ConServe, arXiv:2410.01228): the passes of an online and an
offline request, computed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, oracle_test
from anydecode.certification.oracles.schedules.passes import LONG, passes, rows_of, same_text
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_model
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

#: A range of layers that ran: the first, the one after the last, and the number of rows.
Range = tuple[int, int, int]


@oracle_test("online-offline")
def online_offline() -> Iterator[Check]:
    """Budget 100; offline requests get what online requests leave, and at most 30 rows."""
    schedule = "online-offline:row_budget=100,offline=30"
    rows = rows_of(passes(schedule, [75, 90], tokens=2, priority=[1, 0]))
    expected = [{1: 90, 0: 10}, {1: 1, 0: 30}, {0: 30}, {0: 5}, {0: 1}]
    yield Check("offline requests fill what online requests leave", rows == expected, str(rows))
    # By the default costs, a pass over n rows takes 0.9 + n / 10. By default offline rows at most
    # double it: 8 + n rows beside n (in floating point, 8 + n + 1 exceed the double); and all rows
    # of a pass without online requests.
    rows = rows_of(passes("online-offline", [600, 8, 5], tokens=2, priority=[1, 0, 0]))
    expected = [{2: 5, 1: 8, 0: 21}, {2: 1, 1: 1, 0: 10}, {0: 512}, {0: 57}, {0: 1}]
    yield Check("by default online passes take twice the time at most", rows == expected, str(rows))
    # 3.05 * 1.3 is the time of 30.65 rows, 3.05 * 1.1 that of 24.55. Offline decodes count too,
    # before offline prompts.
    rows = rows_of(passes("online-offline:stretch=3.05", [3, 100, 2, 2], tokens=9,
                          priority=[1, 1, 0, 0]))  # fmt: skip
    expected = [{2: 2, 3: 2, 0: 3, 1: 23}, {2: 1, 3: 1, 0: 1, 1: 21}, {2: 1, 3: 1, 0: 1, 1: 21}]
    yield Check("offline decodes come first within the limit", rows[:3] == expected, str(rows))
    # 3.05 seconds are the time of 21.5 rows. Of the prompt of 30 online rows, the first pass takes
    # 3.9 seconds alone, so that the offline request waits; then it gets 20 rows beside one.
    rows = rows_of(passes("online-offline:seconds=3.05", [50, 30], tokens=3, priority=[1, 0]))
    expected = [{1: 30}, {1: 1, 0: 20}, {1: 1, 0: 20}, {0: 10}, {0: 1}, {0: 1}]
    yield Check("online passes take at most the given seconds", rows == expected, str(rows))
    yield same_text("online-offline")
    yield from _between_layers()
    yield from _same_text_between_layers()


def _between_layers() -> Iterator[Check]:
    """The ranges of layers of an offline prompt of 100 rows, when a prompt of 5 rows arrives."""
    offline, schedule = (100, 1), "online-offline:layers=2,offline=200"
    ranges = _ranges(schedule, [offline, (5, 0)], look=2)
    name = "offline rows leave a pass between two layers"
    yield Check(name, ranges == [(0, 2, 100), *_thirds(105)], str(ranges))
    ranges = _ranges(schedule, [offline, (5, 2)], look=2)
    name = "they do not for another offline request"
    yield Check(name, ranges == [*_thirds(100), *_thirds(5)], str(ranges))
    ranges = _ranges(schedule, [offline, (2, 0), (5, 0)], look=3)
    expected = [(0, 2, 102), (2, 4, 102), (4, 6, 2), *_thirds(105)]
    yield Check("online rows go on without them", ranges == expected, str(ranges))
    ranges = _ranges(schedule, [offline, (5, 0)], look=2, max_running=1)
    expected = [*_thirds(100), (0, 6, 5)]
    yield Check("none leave if the online request cannot start", ranges == expected, str(ranges))
    # A pass of 12 milliseconds has 5 in 2.5 of its 6 layers.
    ranges = _ranges("online-offline", [offline, (5, 0)], look=2, seconds=0.012)
    expected = [(0, 3, 100), (0, 3, 105), (3, 6, 105)]
    yield Check("by default after 5 milliseconds", ranges == expected, str(ranges))


def _thirds(rows: int) -> list[Range]:
    return [(0, 2, rows), (2, 4, rows), (4, 6, rows)]


def _ranges(
    schedule: str,
    requests: Seq[tuple[int, int]],
    *,
    look: int,
    max_running: int = 256,
    seconds: float | None = None,
) -> list[Range]:
    """The ranges of layers that run for prompts of these lengths and priorities, of which the last
    arrives when passes look for new requests for the `look`-th time; a pass takes `seconds`. One
    token is generated."""
    model: Any = ScriptedModel(seed=1, num_layers=6)
    ranges: list[Range] = []
    with LLM(
        model,
        tokenizer=ByteTokenizer(),
        schedule=schedule,
        prefix_cache=False,
        max_running=max_running,
    ) as llm:
        if seconds is not None:
            llm.cost_model = FixedCosts(lambda rows, context: seconds)
        plain: dict[str, Any] = {"decoder": "autoregressive", "max_tokens": 1, "ignore_eos": True}
        jobs = [
            llm.request([97] * length, priority=priority, **plain).jobs[0]
            for length, priority in requests
        ]
        run, engine, looks, arriving = model.run, llm.engine, 0, jobs[-1:]

        def recorded(rows: Any, *given: Any) -> Any:
            ranges.append((int(rows.start[0]), int(rows.stop[0]), len(rows)))
            return run(rows, *given)

        def arrivals() -> list[Any]:
            nonlocal looks
            looks += 1
            return [job.sequence for job in arriving] if looks >= look else []

        model.run, engine.arrivals = recorded, arrivals
        for job in jobs[:-1]:
            engine.submit(job)
        while engine.has_work or arriving:
            engine.step()
            if arriving and (looks >= look or not engine.has_work):
                engine.submit(arriving.pop())
    return ranges


def _same_text_between_layers() -> Iterator[Check]:
    """Every second request is offline, and its rows leave passes at random."""
    prompts, left = [*LONG, *PROMPTS], 0
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    models: dict[str, Callable[[], Any]] = {
        "scripted": partial(ScriptedModel, seed=1),
        "transformer": partial(tiny_model, layers=4),
    }
    for name, made in models.items():
        for decoder in ("autoregressive", "prompt-lookup"):
            with LLM(made(), tokenizer=ByteTokenizer()) as llm:
                expected = [one.tokens for one in llm.generate(prompts, **options)]
            with LLM(made(), tokenizer=ByteTokenizer(), schedule="online-offline") as llm:
                engine, draws = llm.engine, random.Random(5)
                online = llm.request(prompts[0], **options).jobs[0].sequence
                commit = engine._commit

                def arrivals(draws: random.Random = draws, online: Any = online) -> list[Any]:
                    return [online] if draws.random() < 0.1 else []

                def counted(runner: Any, plan: Any, output: Any, commit: Any = commit) -> None:
                    nonlocal left
                    left += len(plan.left)
                    commit(runner, plan, output)
                    llm.engine.check_integrity()  # noqa: B023

                engine.arrivals, engine._commit = arrivals, counted  # type: ignore[method-assign]
                requests = [
                    llm.request(prompt, decoder=decoder, priority=number % 2, **options)
                    for number, prompt in enumerate(prompts)
                ]
                for request in requests:
                    engine.submit(request.jobs[0])
                while engine.has_work:
                    engine.step()
                tokens = [request.jobs[0].sequence.tokens for request in requests]
            name_of_check = f"the text is the same if rows leave passes, {decoder}, {name}"
            yield Check(name_of_check, tokens == expected)
    yield Check("rows have left passes", left > 20, f"{left} spans")
