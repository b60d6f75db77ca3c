"""Measuring what passes cost on this machine, once per model, backend and number of threads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np

from anydecode.kernels.interface import KeyValues, OutputSpec, Rows
from anydecode.models.interface import Model
from anydecode.scoring.cost import CostCorrection, CostTable, default_table

if TYPE_CHECKING:
    from anydecode.engine.engine import Engine
    from anydecode.engine.model_runner import Plan

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS = (256, 1024)
ROUNDS = 3
#: Seconds that measuring may take, about; large models are measured at fewer points.
MAX_SECONDS = 3.0


def measure(
    model: Model,
    rows: Seq[int] = ROWS,
    contexts: Seq[int] = CONTEXTS,
    rounds: int = ROUNDS,
) -> CostTable:
    """Time passes of `rows` rows behind `contexts` positions, logits of every row included: the
    fastest of `rounds` interleaved rounds after a warm-up, since whatever else runs on the machine
    only adds. Keys and values are zeros. Where that would try anyone's patience, the first four
    numbers of rows are timed behind the first context, once."""
    longest = min(max(contexts), model.spec.max_positions - max(rows))
    lengths = sorted({min(context, longest) for context in contexts})
    cache = model.new_cache(longest + max(rows))
    first = min(_time(model, cache, 1, lengths[0]) for _ in range(2))
    if first * len(rows) * len(lengths) * (rounds + 1) > MAX_SECONDS:
        rows, lengths, rounds = rows[:4], lengths[:1], 1
    times: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds + 1):
        for length in lengths:
            for count in rows:
                seconds = _time(model, cache, count, length)
                if turn:
                    times.setdefault((length, count), []).append(seconds)
    return CostTable(
        {length: {count: min(times[length, count]) for count in rows} for length in lengths}
    )


def load(model: Model, folder: Path | None = None) -> CostTable:
    """The model's table: measured at first use, then read from the cache folder. One measured while
    the machine was busy is kept until a process finds it idle. Models that did not come from a file
    are not measured: theirs is a guess."""
    held = getattr(model, "cost_table", None)
    if held is None:
        held = _stored(model, folder) if getattr(model, "path", None) else default_table()
        model.cost_table = held  # type: ignore[attr-defined]
    table: CostTable = held
    return table


class EngineCostModel:
    """The engine as its decoders may see it (`scoring.cost.CostModel`)."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._engine = engine
        self._model = model
        self._table: CostTable | None = None
        self._correction = CostCorrection()
        engine.on_pass = self.passed

    def seconds(self, rows: int, context: int) -> float:
        if self._table is None:
            if not self._engine.is_between_passes:
                return default_table().seconds(rows, context)
            self._table = load(self._model)
        return self._table.seconds(rows, context) * self._correction(rows)

    def num_others(self) -> int:
        return max(0, len(self._engine.running) - 1)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """A pass over that many rows behind `context` positions took this long."""
        if self._table is not None and (wanted := self._table.seconds(rows, context)) > 0:
            self._correction.record(rows, seconds / wanted)

    def passed(self, plan: Plan, seconds: float) -> None:
        """A step with this pass took this long. Prompts, which want few logits for many rows, and
        passes that the backend repeats by itself are not what the table holds."""
        rows = len(plan.rows)
        if plan.num_passes == 1 and len(plan.output_spec.logits) == rows:
            self.record(rows, int(plan.rows.prefix.mean()), seconds)


def identity(model: Any) -> dict[str, Any]:
    """What a table belongs to: the file, who runs it, and on how many threads."""
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


def _stored(model: Any, folder: Path | None) -> CostTable:
    from anydecode.folders import default_cache

    key = json.dumps(identity(model), sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    file = (folder or default_cache()) / "costs" / f"{name}.json"
    busy = _is_busy()
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if busy or not data.get("busy"):
            return CostTable.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    table = measure(model)
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = {"for": json.loads(key), "busy": busy, **table.to_dict()}
        scratch.write_text(json.dumps(data), "utf-8")
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)
    return table


def _is_busy() -> bool:
    """Whether others keep this machine's cores from us, as far as it can tell."""
    load = getattr(os, "getloadavg", lambda: (0.0,))()[0]
    return bool(load > 1.5 * (os.cpu_count() or 1))


def _time(model: Model, cache: KeyValues, count: int, context: int) -> float:
    def numbers(value: Any) -> np.ndarray:
        return np.array(value, np.int32)

    slots = np.arange(context, context + count, dtype=np.int32)
    zeros, depth = np.zeros(count, np.int32), model.spec.num_layers
    rows = Rows(
        tokens=zeros + 1,
        positions=slots,
        slots=slots,
        tables=[np.arange(context + count, dtype=np.int32)],
        table=zeros,
        prefix=numbers(slots + 1),
        tails=numbers([]),
        tail_start=zeros,
        tail_length=zeros,
        start=zeros,
        stop=numbers([depth] * count),
    )
    began = _worked(model)
    output = model.run(rows, cache, OutputSpec(np.arange(count, dtype=np.int32)))
    output.logits.cpu()
    return _worked(model) - began


def _worked(model: Any) -> float:
    """Seconds that the threads of `model` have worked, where it has threads of its own: time during
    which other processes hold the cores is not the model's. Else seconds by the clock."""
    threads = getattr(getattr(model, "executor", None), "threads", None)
    return process_time() / threads if threads else perf_counter()
