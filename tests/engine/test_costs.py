"""The measured costs of passes: which points are timed, within the model's context."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread
from time import process_time, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.engine import costs
from anydecode.kernels.interface import OutputSpec
from anydecode.models.opening import open_model
from anydecode.models.scripted import ScriptedModel
from anydecode.scoring.cost import CostTable, default_table


def timed(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], int]:
    """How often each (context, rows) is timed by one measurement."""
    counts: dict[tuple[int, int], int] = {}
    run = model.run

    def counted(rows, cache, output_spec):  # type: ignore[no-untyped-def]
        key = int(rows.positions[len(rows) // 2]), len(rows)
        counts[key] = counts.get(key, 0) + 1
        cache.keys[0][:] = 1.0  # the scripted model refuses to read what was not stored
        for keys in cache.keys:
            keys[:] = 1.0
        return run(rows, cache, output_spec)

    monkeypatch.setattr(model, "run", counted)
    table = costs.measure(model, rows=(1, 2, 3, 4, 6), contexts=(8, 24), rounds=2)
    assert all(seconds >= 0 for line in table.seconds_by.values() for seconds in line.values())
    assert {
        (context, count) for context, line in table.seconds_by.items() for count in line
    } == set(counts)
    return counts


def test_every_point_is_timed_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = timed(ScriptedModel(), monkeypatch)
    assert set(counts) == {(c, n) for c in (8, 24) for n in (1, 2, 3, 4, 6)}
    first = counts.pop((8, 1))
    assert set(counts.values()) == {3} and first == 2 + 3  # with a round to warm up


def test_rows_without_logits_in_descending_order_and_averages_of_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, asked, run = ScriptedModel(), [], ScriptedModel.run

    def seen(rows, cache, output_spec):  # type: ignore[no-untyped-def]
        for keys in cache.keys:
            keys[:] = 1.0
        asked.append((len(rows), output_spec.logits.tolist()))
        return run(model, rows, cache, output_spec)

    clock = iter(range(1000))
    monkeypatch.setattr(model, "run", seen)
    table = costs.measure(
        model,
        (1, 4),
        (8,),
        rounds=2,
        clock=lambda model: next(clock) ** 2,
        max_seconds=float("inf"),
        num_logits=1,
        of_rounds=max,
    )
    assert asked == [(1, [0]), (1, [0]), *[(4, [3]), (1, [0])] * 3]
    # The clock's n-th interval takes 4 n + 1: the last round has intervals 6 and 7.
    assert table.seconds_by == {8: {1: 29, 4: 25}}


def test_contexts_leave_room_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = timed(ScriptedModel(max_positions=20), monkeypatch)
    assert {context for context, _ in counts} == {8, 14}


def test_slow_models_are_timed_at_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_SECONDS", 0.0)
    counts = timed(ScriptedModel(), monkeypatch)
    assert counts == {(8, 1): 2 + 2, (8, 2): 2, (8, 3): 2, (8, 4): 2}


def test_costs_that_cannot_be_saved_are_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda model: default_table())
    (tmp_path / "costs").write_text("where a folder should be")
    model: Any = SimpleNamespace(path=str(tmp_path / "costs"), executor=None)
    with pytest.warns(UserWarning, match="not saved .*ANYDECODE_HOME names another") as caught:
        assert costs.load(model, tmp_path) == default_table()
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_costs_by_threads_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With six threads: with 1, 2, 4 and 6. Twice the threads are twice as fast here."""
    (tmp_path / "model").touch()
    executor = SimpleNamespace(threads=6, threads_in_use=6)
    model: Any = SimpleNamespace(path=str(tmp_path / "model"), executor=executor)
    measured = []

    def measure(model: Any, rows: Any, contexts: Any, clock: Any) -> CostTable:
        measured.append((executor.threads_in_use, rows, contexts))
        return CostTable({256: {1: 12 / executor.threads_in_use, 16: 24 / executor.threads_in_use}})

    monkeypatch.setattr(costs, "measure", measure)
    for _ in range(2):
        table = costs.load_by_threads(model, tmp_path)
        assert table is not None and executor.threads_in_use == 6
        seconds = [table.seconds(16, 300, threads) for threads in (1, 2, 3, 4, 5, 6)]
        assert seconds == pytest.approx([24, 12, 8, 6, 4.8, 4])
    assert measured == [(threads, (1, 16), (256,)) for threads in (1, 2, 4, 6)]


def test_threads_measure_one_after_the_other_and_a_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models, of which each of two has two users, as two `LLM`s on one model."""
    models: list[Any] = []
    for name in "abc":
        (tmp_path / name).touch()
        executor = SimpleNamespace(threads=1, threads_in_use=1)
        models.append(SimpleNamespace(path=str(tmp_path / name), executor=executor))
    measured, running, most, start = list[Any](), list[Any](), list[int](), Barrier(5)

    def measure(model: Any, *args: Any, **options: Any) -> CostTable:
        running.append(model)
        sleep(0.05)  # for the others to begin
        most.append(len(running))
        running.remove(model)
        measured.append(model)
        return default_table()

    def use(index: int) -> None:
        start.wait()
        load = costs.load_by_threads if index == 2 else costs.load
        load(models[index], tmp_path / "folder")

    monkeypatch.setattr(costs, "measure", measure)
    threads = [Thread(target=use, args=(index,)) for index in (0, 0, 1, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert sorted(model.path for model in measured) == sorted(model.path for model in models)


def test_costs_by_threads_need_a_file() -> None:
    assert costs.load_by_threads(ScriptedModel()) is None


def test_models_without_a_file_have_default_costs() -> None:
    model = ScriptedModel()
    table = costs.load(model)
    assert table is costs.load(model)
    assert table.seconds(2, 0) > table.seconds(1, 0) > 0


class Rows:
    """The part of a pass's rows that a cost model reads."""

    def __init__(self, count: int) -> None:
        self.prefix = np.full(count, 10)

    def __len__(self) -> int:
        return len(self.prefix)


@pytest.mark.parametrize(
    ("num_rows", "num_logits", "num_passes", "counts"),
    [
        (8, 8, 1, True),
        (1, 1, 1, True),
        (8, 1, 1, False),  # a prompt: most rows have no logits
        (1, 1, 4, False),  # several steps in one pass
    ],
)
def test_a_pass_corrects_the_costs_if_the_table_describes_it(
    num_rows: int, num_logits: int, num_passes: int, counts: bool
) -> None:
    plan: Any = SimpleNamespace(
        rows=Rows(num_rows),
        output_spec=OutputSpec(np.arange(num_logits, dtype=np.int32)),
        num_passes=num_passes,
        scheduled=[None] * 2,
        seconds=0.5,
    )
    with scripted_llm() as llm:
        model: Any = llm.cost_model
        expected = model.seconds(num_rows, 10)
        model.on_pass(plan, 2 * expected)
        found = model.seconds(num_rows, 10)
        assert model.host_seconds(6) == pytest.approx(6 * 0.05 * (2 * expected - 0.5) / 2)
        model.on_pass(plan, 0.5)
        assert model.host_seconds(6) == pytest.approx(3 * 0.05 * (2 * expected - 0.5) / 2)
    assert found > expected if counts else found == expected


def test_the_time_of_the_kernels_threads_is_counted() -> None:
    """What passes take on two threads, of which the caller is one: the processor time of a process
    that does nothing else."""
    model: Any = open_model("tiny-autoregressive", threads=2)[0]
    cache = model.new_cache(64)

    def run_passes(count: int) -> None:
        for _ in range(count):
            costs.time_pass(model, cache, 16, 32, lambda model: 0.0, 16)

    run_passes(4)  # starts the threads
    busy, process = costs.busy_seconds(model), process_time()
    while process_time() < process + 0.5:
        run_passes(50)
    process = process_time() - process
    assert 2 * (costs.busy_seconds(model) - busy) == pytest.approx(process, rel=0.2)
