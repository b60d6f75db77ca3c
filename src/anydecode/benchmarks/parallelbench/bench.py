"""`anydecode bench parallelbench`: accuracy of parallel unmasking against passes per token, by
task.

Every method answers the same questions. All passes are counted, whatever their purpose (opening a
block, writing a cache, verifying a draft), and so are all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from anydecode import catalogue
from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import progress
from anydecode.report import JsonFile, PlotFile, split_methods, split_names, write_report
from anydecode.tasks.tasks import (
    TASKS,
    Example,
    examples,
    lengths,
)

#: Groups of rows that `overall` averages: all, or those of one kind of task.
KINDS = ("all", "determined", "dependent", "held-out lengths")


@dataclass(frozen=True)
class Row:
    """Results of one method on one task and length.

    Attributes:
        method: Key of the method.
        task: Name of the task.
        length: Length of the task.
        examples: Number of examples.
        accuracy: Share of right answers.
        strict: Share of right answers with exact white space.
        passes: Mean number of forward passes.
        tokens: Mean number of generated tokens, including the end token.
        rows: Mean number of rows computed by the passes.
        seconds: Median time per example, in seconds.
    """

    method: str
    task: str
    length: int
    examples: int
    accuracy: float
    strict: float
    passes: float
    tokens: float
    rows: float
    seconds: float


def questions(
    tasks: Sequence[str], sizes: Sequence[int] | None, count: int, seed: int
) -> list[list[Example]]:
    """`count` held-out examples per task and length. Without `sizes`, the lengths are the shortest
    and the longest trained one, and the held-out one of list tasks."""
    groups = []
    for task in tasks:
        if task not in TASKS:
            raise InvalidRequestError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
        trained, held_out = lengths(task), TASKS[task].held_out
        chosen = {trained[0], trained[-1]}
        if held_out is not None:
            chosen = {*sizes} if sizes else {*chosen, held_out}
        groups += [
            list(examples(task, count, seed=seed, length=length)) for length in sorted(chosen)
        ]
    return groups


def measure(
    llm: LLM,
    method: str,
    groups: Sequence[Sequence[Example]],
    advance: Callable[[], None] = lambda: None,
    batch: int = 1,
    **options: Any,
) -> list[Row]:
    """One row per group. `options` are passed to `LLM.generate`. Raises `AnydecodeError` if the
    method cannot run."""
    rows = []
    for group in groups:
        answers: list[Generation] = []
        for start in range(0, len(group), batch):
            prompts = [example.prompt for example in group[start : start + batch]]
            answers += llm.generate(prompts, decoder=method, **options)
        advance()
        right = [e.is_right(a.text) for e, a in zip(group, answers, strict=True)]
        strict = [e.is_strictly_right(a.text) for e, a in zip(group, answers, strict=True)]
        stats = [answer.stats for answer in answers]
        rows.append(
            Row(
                method,
                group[0].task,
                group[0].length,
                len(group),
                _mean(right),
                _mean(strict),
                _mean([one.passes for one in stats]),
                _mean([one.num_tokens for one in stats]),
                _mean([one.rows for one in stats]),
                median(one.seconds for one in stats) / min(batch, len(group)),
            )
        )
    return rows


def overall(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over the rows of each method and kind of task, and passes per token."""
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        for kind in KINDS:
            chosen = [row for row in rows if row.method == method and _has_kind(row, kind)]
            if chosen:
                names = ("accuracy", "strict", "passes", "tokens", "rows", "seconds")
                means = {name: _mean([getattr(row, name) for row in chosen]) for name in names}
                rate = means["passes"] / max(means["tokens"], 1e-9)
                lines.append({"method": method, "kind": kind, **means, "passes_per_token": rate})
    return lines


def diffusion_methods() -> list[str]:
    """Keys of the diffusion decoders in the catalogue; first `llada`, which fills one token per
    pass."""
    built = {card.key: catalogue.build(card.key) for card in catalogue.cards("diffusion")}
    keys = [key for key, method in built.items() if isinstance(method, Decoder)]
    return sorted(keys, key=lambda key: key != "llada")


def _has_kind(row: Row, kind: str) -> bool:
    task = TASKS[row.task]
    if kind == "held-out lengths":
        return row.length == task.held_out
    return kind == "all" or task.is_determined == (kind == "determined")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def measure_interleaved(
    runs: Sequence[tuple[LLM, str]],
    groups: Sequence[Sequence[Example]],
    skipped: dict[str, str],
    is_explicit: bool,
    advance: Callable[[], None],
    **options: Any,
) -> Iterator[Row]:
    """Measure every group with all runs in turn (a model and a method, each method once), so that
    other load on the machine affects all equally. Each method first answers one question as a
    warm-up. A method that cannot run is added to `skipped`, or raises if the methods are
    explicit."""
    for llm, method in runs:
        try:
            measure(llm, method, [groups[0][:1]], **options)
        except AnydecodeError as error:
            if is_explicit:
                raise
            skipped[method] = " ".join(str(error).split())
    for group in groups:
        for llm, method in runs:
            if method not in skipped:
                yield from measure(llm, method, [group], advance, **options)


def bench_parallelbench(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "tiny-diffusion"
    ),
    methods: Annotated[
        str,
        typer.Option(
            "--methods", help="Keys, separated by commas; default: all diffusion methods."
        ),
    ] = "",
    draft: Annotated[
        str | None, typer.Option("--draft", help="A draft model, for methods that need one.")
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; default: all.")
    ] = "",
    sizes: Annotated[
        str, typer.Option("--lengths", help="Lengths of lists, separated by commas.")
    ] = "",
    count: Annotated[
        int, typer.Option("--count", min=1, help="Examples per task and length.")
    ] = 25,
    tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, help="Most tokens of an answer: the canvas length."),
    ] = 32,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the questions and of sampling.")] = 0,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Questions per batch; times are divided by it.")
    ] = 1,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure accuracy against passes per token, on tasks with checkable answers.

    Example: anydecode bench parallelbench --methods fast-dllm --count 10 --json out.json
    """
    from anydecode.benchmarks.parallelbench import report as reporting

    try:
        chosen_sizes = [int(part) for part in split_names(sizes)]
    except ValueError:
        raise InvalidRequestError(
            f"--lengths is {sizes!r}; give whole numbers separated by commas"
        ) from None
    chosen_tasks = split_names(tasks) or [*TASKS]
    groups = questions(chosen_tasks, chosen_sizes or None, count, seed)
    chosen_methods = split_methods(methods)
    skipped: dict[str, str] = {}
    with LLM(model, draft=draft, threads=threads or None) as llm:
        for method in chosen_methods:
            llm.decoder(method)
        options = {"max_tokens": tokens, "temperature": temperature, "seed": seed, "batch": batch}
        keys = chosen_methods or diffusion_methods()
        with progress("tasks", len(keys) * len(groups)) as bar:
            runs, is_explicit = [(llm, key) for key in keys], bool(chosen_methods)
            rows = [
                *measure_interleaved(runs, groups, skipped, is_explicit, bar.advance, **options)
            ]
    if not rows:
        raise InvalidRequestError(
            f"no method can run with this model: {next(iter(skipped.values()), '')}"
        )
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        **{name: value for name, value in options.items() if name != "batch"},
        "count": count,
        "overall": overall(rows),
        "rows": [asdict(row) for row in rows],
        "left_out": skipped,
    }
    if plot is not None:
        reporting.draw(report, plot)
    write_report(report, json_file, lambda: reporting.print_report(report))
