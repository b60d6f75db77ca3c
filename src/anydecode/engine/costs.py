"""Measures the duration of forward passes on this machine, once per model, backend and number of
threads."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from anydecode.kernels.host import to_host
from anydecode.kernels.interface import KeyValues, OutputSpec, Rows
from anydecode.models.interface import Model
from anydecode.scoring.cost import (
    CostCorrection,
    CostModel,
    CostTable,
    ThreadCosts,
    default_table,
)
from anydecode.scoring.sequence_data import TARGET

if TYPE_CHECKING:
    from anydecode.engine.engine import Engine
    from anydecode.engine.plan import Plan

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS = (256, 1024)
ROUNDS = 3
#: Held by the thread that measures: models of one process would be measured beside each other, and
#: two for one model would write the same file.
_MEASURING = Lock()
#: Approximate maximum duration of a measurement in seconds; slow models are measured at fewer
#: points.
MAX_SECONDS = 3.0


def measure(
    model: Model,
    rows: Seq[int] = ROWS,
    contexts: Seq[int] = CONTEXTS,
    rounds: int = ROUNDS,
    clock: Callable[[Model], float] | None = None,
    max_seconds: float | None = None,
    num_logits: int | None = None,
    of_rounds: Callable[[Seq[float]], float] = min,
) -> CostTable:
    """Measure passes of `rows` rows of one sequence that attend to `contexts` positions on average.

    Takes the fastest of `rounds` interleaved rounds after a warm-up, since other load on the
    machine only adds time, or what `of_rounds` makes of them. Keys and values are zeros. If the
    full grid would take longer than `max_seconds`, only the first four row counts are timed, once,
    at the shortest context.

    Args:
        model: The model.
        rows: Numbers of rows.
        contexts: Numbers of cached positions.
        rounds: Number of rounds.
        clock: The time in seconds; by default processor time per thread if the model has threads of
            its own.
        max_seconds: The maximum, as if all passes had one row; None: `MAX_SECONDS`.
        num_logits: The number of rows, the last ones, whose logits are computed; None: all.
        of_rounds: The duration of a pass by those of the rounds.
    """
    clock = clock or busy_seconds
    if max_seconds is None:
        max_seconds = MAX_SECONDS
    longest = min(max(contexts), model.spec.max_positions - max(rows))
    lengths = sorted({min(context, longest) for context in contexts})
    cache = model.new_cache(longest + max(rows))
    first = min(time_pass(model, cache, 1, lengths[0], clock, 1) for _ in range(2))
    if first * len(rows) * len(lengths) * (rounds + 1) > max_seconds:
        rows, lengths, rounds = rows[:4], lengths[:1], 1
    times: dict[tuple[int, int], list[float]] = {}
    for round in range(rounds + 1):
        for length in lengths:
            for count in sorted(rows, reverse=True):  # behind many rows, few take longer
                seconds = time_pass(model, cache, count, length, clock, num_logits or count)
                if round:
                    times.setdefault((length, count), []).append(seconds)
    return CostTable(
        {length: {count: of_rounds(times[length, count]) for count in rows} for length in lengths}
    )


@contextmanager
def computing(model: Model, rows: int, context: int) -> Iterator[None]:
    """Compute passes of so many rows, one after another, on a thread of its own meanwhile."""
    cache, stop = model.new_cache(context + rows), Event()

    def compute() -> None:
        while not stop.is_set():
            time_pass(model, cache, rows, context, lambda model: 0.0, 1)

    thread = Thread(target=compute, name="anydecode-costs")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def load(model: Model, folder: Path | None = None) -> CostTable:
    """The cost table of `model`: measured at first use, then read from the cache folder.

    A table measured on a busy machine is used until a process finds the machine idle. Models that
    were not loaded from a file get the default table.
    """
    found: CostTable | None = getattr(model, "cost_table", None)
    if found is not None:
        return found
    with _MEASURING:
        found = getattr(model, "cost_table", None)
        if found is None:
            if getattr(model, "path", None):
                found = _stored(identity(model), lambda: measure(model), folder)
            else:
                found = default_table()
            model.cost_table = found  # type: ignore[attr-defined]
    return found


def load_by_threads(model: Any, folder: Path | None = None) -> ThreadCosts | None:
    """The cost tables of `model` with 1, 2, 4, ... and all of its threads, stored as those of
    `load`, for the smallest and the largest of `ROWS` at the shortest context.

    They are measured by the wall clock, since threads without work also use processor time. None
    for models that were not loaded from a file.
    """
    if not getattr(model, "path", None):
        return None
    executor, known = model.executor, identity(model)
    counts = {executor.threads, *(1 << i for i in range(executor.threads.bit_length()))}
    tables: dict[int, CostTable] = {}

    def measured() -> CostTable:
        return measure(model, (ROWS[0], ROWS[-1]), CONTEXTS[:1], clock=lambda model: perf_counter())

    with _MEASURING:
        in_use = executor.threads_in_use
        try:
            for count in sorted(counts):
                executor.threads_in_use = count
                tables[count] = _stored({**known, "threads_in_use": count}, measured, folder)
        finally:
            executor.threads_in_use = in_use
    return ThreadCosts(tables)


#: Weight of a step in the average of what steps take beside their passes, if it took longer.
HOST_RATE = 0.05
#: Costs are computed anew after so many recorded passes, each of which corrects them by a small
#: part of its deviation (`CostCorrection`).
VERSION_PASSES = 64


class EngineCostModel(CostModel):
    """The cost model of an engine: the measured table of its target, corrected by the passes that
    it runs."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._engine = engine
        self._model = model
        self._table: CostTable | None = None
        self._correction = CostCorrection()
        self._num_recorded = 0  # passes
        self._host_seconds = 0.0  # per sequence
        engine.on_pass = self.on_pass

    def seconds(self, rows: int, context: int) -> float:
        table = self._measured()
        if table is None:
            return default_table().seconds(rows, context)
        return table.seconds(rows, context) * self._correction(rows)

    def _measured(self) -> CostTable | None:
        """The measured table; None while it cannot be measured."""
        if self._table is None and self._engine.is_between_passes:
            with self._engine.runners[TARGET].turns.lock:
                self._table = load(self._model)
        return self._table

    def version(self) -> int:
        return 0 if self._measured() is None else 1 + self._num_recorded // VERSION_PASSES

    def num_others(self) -> int:
        return max(0, len(self._engine.running) - 1)

    def host_seconds(self, num_sequences: int) -> float:
        return self._host_seconds * num_sequences

    def num_waiting(self) -> int:
        return len(self._engine.waiting)

    def end_rate(self) -> float:
        return self._engine.num_stopped / max(1, self._engine.num_tokens)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Record the duration of a pass over `rows` rows that attend to `context` positions."""
        if self._table is not None:
            self._correction.record(rows, seconds / self._table.seconds(rows, context))
            self._num_recorded += 1

    def on_pass(self, plan: Plan, seconds: float) -> None:
        """Record the duration of a step. Prompts (few logits for many rows) and multi-step passes
        without drafts are skipped, since the table does not describe them."""
        rows, drafts = len(plan.rows), plan.output_spec.drafts
        host_seconds = max(0.0, seconds - plan.seconds) / len(plan.scheduled)
        # Longer times include other work of the machine.
        rate = HOST_RATE if host_seconds > self._host_seconds else 0.5
        self._host_seconds += rate * (host_seconds - self._host_seconds)
        if drafts and drafts[0].rows:
            context = int(plan.rows.prefix.mean())
            num_rows = map(sum, zip(*(one.rows for one in drafts), strict=True))
            for count, taken in zip(num_rows, drafts[0].seconds, strict=True):
                self.record(count, context, taken)
            return
        if plan.num_passes == 1 and len(plan.output_spec.logits) == rows:
            self.record(rows, int(plan.rows.prefix.mean()), seconds)


def identity(model: Any) -> dict[str, Any]:
    """What a cost table depends on: the model file, the backend and the number of threads."""
    path = Path(model.path)
    status = path.stat()
    executor = model.executor
    return {
        "file": str(path.resolve()),
        "size": status.st_size,
        "changed": status.st_mtime_ns,
        "dtype": str(getattr(model, "dtype", None)),
        "backend": type(executor).__name__,
        "threads": getattr(executor, "threads", None) or os.cpu_count(),
    }


def _stored(
    known: dict[str, Any], measured: Callable[[], CostTable], folder: Path | None
) -> CostTable:
    """The table that is stored for what it depends on, else that of `measured`, which is stored."""
    from anydecode.folders import default_cache

    key = json.dumps(known, sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    file = (folder or default_cache()) / "costs" / f"{name}.json"
    busy = _is_busy()
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if busy or not data.get("busy"):
            return CostTable.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    table = measured()
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = {"for": json.loads(key), "busy": busy, **table.to_dict()}
        scratch.write_text(json.dumps(data), "utf-8")
        scratch.replace(file)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        warnings.warn(
            f"the measured costs of passes are not saved ({file.parent}: {error.strerror});"
            " ANYDECODE_HOME names another folder",
            stacklevel=2,
        )
    return table


def _is_busy() -> bool:
    """Whether other processes use the cores of this machine, by its load average."""
    load = getattr(os, "getloadavg", lambda: (0.0,))()[0]
    return bool(load > 1.5 * (os.cpu_count() or 1))


def time_pass(
    model: Model,
    cache: KeyValues,
    count: int,
    context: int,
    clock: Callable[[Model], float],
    num_logits: int,
) -> float:
    """The duration of a pass over `count` rows of one sequence that attend to `context` positions
    on average, by `clock`. The logits of the last `num_logits` rows are computed."""

    def numbers(value: Any) -> np.ndarray:
        return np.array(value, np.int32)

    first = max(0, context - count // 2)
    slots = np.arange(first, first + count, dtype=np.int32)
    zeros, depth = np.zeros(count, np.int32), model.spec.num_layers
    rows = Rows(
        tokens=zeros + 1,
        positions=slots,
        slots=slots,
        tables=[np.arange(first + count, dtype=np.int32)],
        table=zeros,
        prefix=numbers(slots + 1),
        tails=numbers([]),
        tail_start=zeros,
        tail_length=zeros,
        start=zeros,
        stop=numbers([depth] * count),
    )
    start = clock(model)
    output = model.run(rows, cache, OutputSpec(np.arange(count, dtype=np.int32)[-num_logits:]))
    to_host(output.logits)
    return clock(model) - start


def busy_seconds(model: Any) -> float:
    """Processor time per thread in seconds if `model` has its own threads, which excludes time in
    which other processes use the cores; else the time."""
    executor = getattr(model, "executor", None)
    if executor is None or not hasattr(executor, "processor_seconds"):
        return perf_counter()
    return float(executor.processor_seconds() / executor.threads)
