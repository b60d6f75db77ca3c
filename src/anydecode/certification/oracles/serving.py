"""Oracle tests of schedules: passes computed by hand, and a text that must not change."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, _Restarts, oracle_test, scripted_llm
from anydecode.engine.schedules.layered import boundaries, num_groups
from anydecode.engine.schedules.nexus import chosen_share
from anydecode.engine.schedules.prepacking import pack
from anydecode.engine.schedules.priorities import Fair, Priority
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

#: One pass: (request, rows, first layer, last layer) of every scheduled span.
Pass = set[tuple[int, int, int, int]]
_LONG = ("x" * 200 + "abc" * 50, "hello " * 40, "q" * 300)


def same_text(schedule: str) -> Check:
    """Whether long and short prompts, with and without drafts, with restarts, give the text of the
    default schedule."""
    prompts = [*_LONG, *PROMPTS]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with scripted_llm() as llm:
        expected = [answer.tokens for answer in llm.generate(prompts, **options)]
    for decoder in ("autoregressive", "prompt-lookup"):
        with scripted_llm(schedule=schedule) as llm, _Restarts(llm.engine, seed=5):
            answers = llm.generate(prompts, decoder=decoder, **options)
            llm.engine.check_integrity()
        if [answer.tokens for answer in answers] != expected:
            return Check(f"the text equals the default schedule's, {decoder}", False)
    return Check("the text equals the default schedule's, with restarts", True)


def passes(
    schedule: str, lengths: Seq[int], *, tokens: int, layers: int = 3, **more: Any
) -> list[Pass]:
    """The passes for prompts of these lengths, all submitted at once; `more` has one value per
    prompt for each option, and `running`."""
    running = more.pop("running", 256)
    model = ScriptedModel(seed=1, num_layers=layers)
    engine = {"schedule": schedule, "prefix_cache": False, "max_running": running}
    result: list[Pass] = []
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096, **engine) as llm:
        runner = llm.engine.runners["target"]
        plain: dict[str, Any] = {"decoder": "autoregressive", "ignore_eos": True}
        options = [
            {**plain, **{key: values[i] for key, values in more.items()}}
            for i in range(len(lengths))
        ]
        requests = [
            llm.request([97 + i] * length, max_tokens=tokens, **options[i])
            for i, length in enumerate(lengths)
        ]
        number = {id(request.jobs[0].sequence): i for i, request in enumerate(requests)}
        run = runner.run

        def recording(plan: Any) -> Any:
            result.append(
                {
                    (number[id(score.sequence.root)], count, span.start, span.stop)
                    for score, span, count in plan.scheduled
                }
            )
            return run(plan)

        runner.run = recording  # type: ignore[method-assign]
        for request in requests:
            llm.engine.submit(request.jobs[0])
        while not all(request.done for request in requests):
            llm.engine.step()
    return result


def _rows(all_passes: list[Pass]) -> list[dict[int, int]]:
    return [{request: rows for request, rows, _, _ in one} for one in all_passes]


def stretch(rows: dict[int, int]) -> float:
    """The time of a pass, at default costs, divided by that of its decode rows (one per request)
    alone."""
    decodes = sum(count == 1 for count in rows.values())
    return (0.9 + 0.1 * sum(rows.values())) / (0.9 + 0.1 * decodes)


@oracle_test("sarathi")
def sarathi() -> Iterator[Check]:
    """Budget 100; prompts of 230 and 150 tokens, four output tokens each."""
    rows = _rows(passes("sarathi:budget=100", [230, 150], tokens=4))
    expected = [
        {0: 100}, {0: 100}, {0: 30}, {0: 1, 1: 99}, {0: 1, 1: 51}, {0: 1, 1: 1}, {1: 1}, {1: 1},
    ]  # fmt: skip
    yield Check("one chunk of one prompt beside all decodes", rows == expected, str(rows))
    # By the default costs, a pass over n rows takes 0.9 + n / 10: 14 rows lengthen one decode by a
    # factor of 2.4.
    rows = _rows(passes("sarathi:stretch=2.45", [230, 40], tokens=4))
    expected = [{0: 230}, {0: 1, 1: 14}, {0: 1, 1: 14}, {0: 1, 1: 12}, {1: 1}, {1: 1}, {1: 1}]
    yield Check("a chunk sized by the cost of passes", rows == expected, str(rows))
    yield same_text("sarathi:budget=100")


@oracle_test("sarathi-serve")
def sarathi_serve() -> Iterator[Check]:
    """The same prompts: what one prompt leaves of the budget is given to the next."""
    rows = _rows(passes("sarathi-serve:budget=100", [230, 150], tokens=4))
    expected = [
        {0: 100}, {0: 100}, {0: 30, 1: 70}, {0: 1, 1: 80}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1},
    ]  # fmt: skip
    yield Check("decodes first, then started prompts, then new ones", rows == expected, str(rows))
    rows = _rows(passes("sarathi-serve:budget=80", [70, 70, 70], tokens=30))
    yield Check("no pass exceeds the budget", all(sum(one.values()) <= 80 for one in rows))
    began = next(i for i, one in enumerate(rows) if 0 in one and one[0] == 1)
    yield Check("a decoding request is in every pass", all(0 in one for one in rows[began:][:29]))
    rows = _rows(passes("sarathi-serve:stretch=2.45", [2, 8, 600, 3], tokens=60))
    stretches = [stretch(one) for one in rows if 1 in one.values()]
    yield Check("short prompts too keep within the stretch", max(stretches) <= 2.45, str(stretches))
    yield Check("a pass without decodes uses the whole budget", rows[0] == {0: 2, 1: 8, 2: 502})
    yield same_text("sarathi-serve:budget=70")


@oracle_test("prepacking")
def prepacking() -> Iterator[Check]:
    """Bins of 200: the request of 80 goes to the emptier of two bins with room, which is not the
    tightest fit."""
    lengths = [200, 120, 110, 80, 70]
    yield Check("bins by hand", pack(lengths, 200) == [[0], [1, 4], [2, 3]])
    rows = _rows(passes("prepacking", lengths, tokens=2))
    expected = [{0: 200}, {0: 1, 1: 120, 4: 70}, {1: 1, 4: 1, 2: 110, 3: 80}, {2: 1, 3: 1}]
    yield Check("a bin is a pass, beside all decodes", rows == expected, str(rows))
    yield same_text("prepacking")


@oracle_test("layered-prefill")
def layered_prefill() -> Iterator[Check]:
    """A prompt of 180 tokens in four groups of one layer, beside a decoding request."""
    table = {512: 1, 513: 2, 1024: 2, 1025: 4, 2048: 4, 2049: 8, 4096: 8, 4097: 16, 99999: 16}
    groups = {rows: num_groups(rows, 512, 16) for rows in table}
    yield Check("the number of groups is as published", groups == table, str(groups))
    yield Check("larger groups first", boundaries(5, 2) == [3, 5] and boundaries(4, 4)[0] == 1)
    actual = passes("layered-prefill:unit=50", [2, 180], tokens=6, layers=4)
    expected = [{(0, 2 if i == 0 else 1, 0, 4), (1, 180, i, i + 1)} for i in range(4)]
    expected += [{(0, 1, 0, 4), (1, 1, 0, 4)}] * 2 + [{(1, 1, 0, 4)}] * 3
    yield Check("one layer group per pass, beside all decodes", actual == expected, str(actual))
    actual = passes("layered-prefill:unit=1000,cohort=100", [150, 70], tokens=2)
    expected = [{(0, 100, 0, 3)}, {(0, 50, 0, 3)}, {(0, 1, 0, 3), (1, 70, 0, 3)}, {(1, 1, 0, 3)}]
    yield Check("one cohort at a time, long prompts in chunks", actual == expected, str(actual))
    # 14 rows through all layers beside one decode: 56 rows through one of four, three times.
    actual = passes("layered-prefill:stretch=2.45", [2, 168], tokens=20, layers=4)
    counts = [[count for request, count, _, _ in one if request == 1] for one in actual[1:]]
    yield Check(
        "a cohort sized by the cost of passes", counts[:13] == [[56]] * 12 + [[1]], str(counts)
    )
    yield same_text("layered-prefill:unit=64,cohort=300")


@oracle_test("priority")
def priority() -> Iterator[Check]:
    """One running request; the smallest number is admitted first, whatever the arrival order."""
    rows = _rows(passes("priority", [5, 5, 5], tokens=2, running=1, priority=[5, -1, 3]))
    order = list(dict.fromkeys(request for one in rows for request in one))
    yield Check("admitted by priority", order == [1, 2, 0], str(order))
    sequences: Any = [SimpleNamespace(priority=number) for number in (0, 7, 7, 2)]
    yield Check(
        "the least urgent request, and of those the last, is preempted",
        Priority().victim(sequences) == 2,
    )
    yield same_text("priority")


@oracle_test("online-offline")
def online_offline() -> Iterator[Check]:
    """Budget 100; offline requests get what online requests leave, and at most 30 rows."""
    schedule = "online-offline:row_budget=100,offline=30"
    rows = _rows(passes(schedule, [75, 90], tokens=2, priority=[1, 0]))
    expected = [{1: 90, 0: 10}, {1: 1, 0: 30}, {0: 30}, {0: 5}, {0: 1}]
    yield Check("offline requests fill what online requests leave", rows == expected, str(rows))
    yield same_text("online-offline")


@oracle_test("fair")
def fair() -> Iterator[Check]:
    """One running request, and 10 + 2 * 5 = 20 units per request: many requests of one tenant do
    not delay those of another."""
    tenants = ["a", "a", "a", "a", "b", "b"]
    rows = _rows(passes("fair", [10] * 6, tokens=5, running=1, namespace=tenants))
    order = list(dict.fromkeys(request for one in rows for request in one))
    yield Check("the tenant served least is next", order == [0, 4, 1, 5, 2, 3], str(order))
    schedule = Fair()
    schedule.served = {"a": 40.0, "b": 90.0}
    waiting: Any = [SimpleNamespace(namespace=name, tokens=[], finished=False) for name in "abc"]
    schedule.next_job(waiting[:2])
    schedule.next_job(waiting)
    yield Check("a late tenant gets no credit for idle time", schedule.served["c"] == 40.0)
    yield same_text("fair")


def _linear(rows: int) -> float:
    """The default cost of an unmeasured pass: one for the first row, and a tenth for each further
    row."""
    return 0.9 + 0.1 * rows


@oracle_test("nexus")
def nexus() -> Iterator[Check]:
    """Shares of 10 to 100 rows beside one decode. Time between tokens: 1 + n / 10, best 2. Prefill
    of 200 rows: ceil(200 / n) times that, best 22 at 100; 40, 30, 28, 25 for 10 to 40."""
    shares = list(range(10, 101, 10))
    options: dict[str, Any] = {"decodes": 1, "prompt": 200, "shares": shares}
    for slack, expected in ((1.0, 10), (1.6, 20), (2.6, 40), (9.0, 100)):
        found = chosen_share(_linear, decode_first=False, slack=slack, **options)
        yield Check(f"prefill first, beta {slack:g}", found == expected, str(found))
    for slack, expected in ((1.0, 100), (1.2, 40), (1.3, 30), (1.4, 20), (2.0, 10)):
        found = chosen_share(_linear, decode_first=True, slack=slack, **options)
        yield Check(f"decode first, alpha {slack:g}", found == expected, str(found))
    rows = _rows(passes("nexus:row_budget=100,steps=10,beta=1.6", [5, 150, 70], tokens=12))
    first = [{0: 5, 2: 20}, *[{0: 1, 2: 20}] * 2, {0: 1, 2: 10, 1: 10}]
    yield Check("the shortest prompt first, in shares of 20", rows[:4] == first, str(rows))
    speaking = [one for one in rows if 0 in one]
    yield Check("a decoding request is in every pass", rows[:12] == speaking)
    for ageing, request in ((0, 2), (1000, 1)):
        late = f"nexus:row_budget=20,steps=2,ageing={ageing}"
        rows = _rows(passes(late, [5, 150, 70], tokens=1, running=2))
        yield Check(
            f"ageing {ageing}: {request} goes first", list(rows[1]) == [request], str(rows[1])
        )
    full = passes("nexus:row_budget=100,steps=10,beta=1,full=-1,alpha=1.2", [5, 200], tokens=3)
    counts = [one.get(1) for one in _rows(full)][:2]
    yield Check("a full cache gives decodes priority", counts == [40, 40], str(counts))
    yield same_text("nexus:row_budget=100,steps=10")
