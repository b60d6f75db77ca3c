"""`anydecode bench parallelbench`: what parallel unmasking gains and loses, task by task.

Every method answers the same questions; accuracy stands against passes per token. A pass is counted
whatever it was for (opening a block, writing a cache, verifying a draft), and so is every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from anydecode import catalogue
from anydecode.decoders.decoder import Decoder
from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.evaluation.parallelbench.tasks import (
    TASKS,
    Example,
    examples,
    lengths,
)
from anydecode.evaluation.report import JsonFile, PlotFile, write_report

#: What the overall lines summarise: all lines of a method, or some kinds of task.
KINDS = ("all", "determined", "dependent", "held-out lengths")


@dataclass(frozen=True)
class Row:
    """A method on one task and length: means over its examples, of the seconds the median. `tokens`
    counts what an answer says, its end included; `rows` what the passes computed."""

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
    """`count` held-out examples per task and length. Without `sizes`, the shortest and the longest
    trained length of a task, and the held-out one if it is a task of lists."""
    groups = []
    for task in tasks:
        if task not in TASKS:
            raise InvalidRequestError(f"no task {task!r}: there are {', '.join(TASKS)}")
        own, held_out = lengths(task), TASKS[task].held_out
        chosen = {own[0], own[-1]}
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
    """A row per group. `options` go to `LLM.generate`. Raises what the method refuses."""
    rows = []
    for group in groups:
        answers: list[Generation] = []
        for start in range(0, len(group), batch):
            asked = [example.prompt for example in group[start : start + batch]]
            answers += llm.generate(asked, decoder=method, **options)
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
    """Per method and kind of task, the means over its rows, and passes per token."""
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        for kind in KINDS:
            chosen = [row for row in rows if row.method == method and _is_of(row, kind)]
            if chosen:
                names = ("accuracy", "strict", "passes", "tokens", "rows", "seconds")
                means = {name: _mean([getattr(row, name) for row in chosen]) for name in names}
                rate = means["passes"] / max(means["tokens"], 1e-9)
                lines.append({"method": method, "kind": kind, **means, "passes_per_token": rate})
    return lines


def diffusion_methods() -> list[str]:
    """The diffusion decoders of the catalogue, first the one that fills a token per pass."""
    built = {card.key: catalogue.build(card.key) for card in catalogue.cards("diffusion")}
    keys = [key for key, method in built.items() if isinstance(method, Decoder)]
    return sorted(keys, key=lambda key: key != "llada")


def split_methods(text: str) -> list[str]:
    """Keys separated by commas or semicolons; `name=value` behind a comma belongs to the key before
    it ("fast-dllm:threshold=0.8,block=8,prophet")."""
    methods: list[str] = []
    for part in filter(None, (part.strip() for part in text.replace(";", ",").split(","))):
        if methods and "=" in part and ":" not in part.split("=")[0]:
            methods[-1] += f",{part}"
        else:
            methods.append(part)
    return methods


def _is_of(row: Row, kind: str) -> bool:
    task = TASKS[row.task]
    if kind == "held-out lengths":
        return row.length == task.held_out
    return kind == "all" or task.is_determined == (kind == "determined")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _measured(
    llm: LLM,
    methods: Sequence[str],
    groups: Sequence[Sequence[Example]],
    left_out: dict[str, str],
    is_choice: bool,
    advance: Callable[[], None],
    **options: Any,
) -> Iterator[Row]:
    """Every group by all methods in turn, so that what else the machine does falls on all alike.
    Before, each answers once: what is built or loaded at first is in nobody's seconds."""
    for method in methods:
        try:
            measure(llm, method, [groups[0][:1]], **options)
        except AnydecodeError as error:
            if is_choice:
                raise
            left_out[method] = " ".join(str(error).split())
    for group in groups:
        for method in methods:
            if method not in left_out:
                yield from measure(llm, method, [group], advance, **options)


def bench_parallelbench(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "tiny-diffusion"
    ),
    methods: Annotated[
        str,
        typer.Option("--methods", help="Keys, separated by commas; all diffusion methods if none."),
    ] = "",
    draft: Annotated[
        str | None, typer.Option("--draft", help="A smaller model, for methods that want one.")
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; all if none.")
    ] = "",
    sizes: Annotated[
        str, typer.Option("--lengths", help="Lengths of lists, separated by commas.")
    ] = "",
    count: Annotated[
        int, typer.Option("--count", min=1, help="Examples per task and length.")
    ] = 25,
    tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer: the canvas.")
    ] = 32,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the questions, and of sampling.")] = 0,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Questions at a time; seconds are shared out.")
    ] = 1,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Accuracy against passes per token, on tasks whose answers can be checked.

    Example: anydecode bench parallelbench --methods fast-dllm --count 10 --json out.json
    """
    from anydecode.evaluation.parallelbench import report as reporting
    from anydecode.evaluation.speculative_report import progress

    try:
        chosen_sizes = [int(part) for part in sizes.split(",") if part.strip()]
    except ValueError:
        raise InvalidRequestError(f"{sizes!r} is no list of lengths") from None
    chosen_tasks = [name.strip() for name in tasks.split(",") if name.strip()] or [*TASKS]
    groups = questions(chosen_tasks, chosen_sizes or None, count, seed)
    named = split_methods(methods)
    left_out: dict[str, str] = {}
    with LLM(model, draft=draft, threads=threads or None) as llm:
        for method in named:
            llm.decoder(method)
        options = {"max_tokens": tokens, "temperature": temperature, "seed": seed, "batch": batch}
        asked = named or diffusion_methods()
        with progress("tasks", len(asked) * len(groups)) as advance:
            rows = [*_measured(llm, asked, groups, left_out, bool(named), advance, **options)]
    if not rows:
        raise InvalidRequestError(f"no method runs here: {next(iter(left_out.values()), '')}")
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        **{name: value for name, value in options.items() if name != "batch"},
        "count": count,
        "overall": overall(rows),
        "rows": [asdict(row) for row in rows],
        "left_out": left_out,
    }
    if plot is not None:
        plot.write_text(reporting.to_svg(report), encoding="utf-8")
    write_report(report, json_file, lambda: reporting.print_report(report))
