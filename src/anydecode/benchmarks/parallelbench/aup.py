"""`anydecode bench aup`: the area under the accuracy-parallelism curve of every diffusion decoder
(AUP; Qian et al., "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation").

A curve has a point for each of several settings of a decoder: the tokens per forward pass and the
accuracy. All passes are counted, those that open a block, write a cache or verify a draft too; the
tokens are those of the answer, with its end, without the padding behind it.

With a causal model, `auto` answers the same questions with it, in turn with the decoders, and the
curve of accuracy over tokens per second says where they cross: up to which accuracy some setting of
a decoder is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.benchmarks.parallelbench.bench import (
    Row,
    diffusion_methods,
    measure_interleaved,
    overall,
    questions,
)
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.plots import COLOURS, INK, figure
from anydecode.progress import progress
from anydecode.report import JsonFile, PlotFile, split_names, table_console, write_report
from anydecode.tasks.tasks import TASKS

#: Points that are less accurate than the first by more than this, in percent, are left out.
MAX_LOSS = 5.0
_THRESHOLDS = ("threshold=0.99", "threshold=0.8", "threshold=0.6", "threshold=0.4")
_STEPS = ("steps=16", "steps=8", "steps=4", "steps=2", "steps=1")
#: The decoder of the causal model.
CAUSAL = "auto"
#: What decoders need that are for models whose noise is random tokens.
_UNIFORM = "uniform-state diffusion model"
#: The settings of each decoder besides its defaults; a decoder that is not here has only these.
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "adablock", "creditdecoding", "dimple", "elastic-cache", "ete", "fast-dllm",
            "fast-dllm-v2", "learn2pd", "localleap", "s2d2", "sdar", "token-editing",
            "window-diffusion", "wino",
        ),
        _THRESHOLDS,
    ),
    **dict.fromkeys(
        (
            "diffusion-gemma", "dream", "dream-coder", "duo", "gidd", "llada", "p2", "remdm",
            "remedi",
        ),
        _STEPS,
    ),
    "apd": ("weight=0", "weight=0.4", "weight=0.9", "weight=1"),
    "bacd-tccf": ("low=0.9,high=0.95", "low=0.4,high=0.6"),
    "ccd": ("rule=averaged",),
    "cd4lm": ("threshold=0.99", "threshold=0.8", "threshold=0.5,max_per_step=16"),
    "dparallel": ("entropy=0.01", "entropy=0.1", "entropy=1", "entropy=2"),
    "eb-sampler": ("gamma=0.01", "gamma=0.5", "gamma=1", "gamma=2"),
    "freedave": ("drafts=2", "drafts=4", "drafts=16"),
    "levenshtein-editing": (
        "edit=0.9", "edit=0.9,threshold=0.8", "edit=0.9,threshold=0.95", "edit=0.9,threshold=0.99",
    ),
    "lrd": ("mixture=0.02", "mixture=0.02,settled=0.5"),
    "prophet": ("early=12,middle=9,late=6", "early=4,middle=2,late=1"),
    "ssd": ("drafts=2", "drafts=4", "drafts=16"),
}  # fmt: skip


class Point(NamedTuple):
    """Tokens per forward pass and accuracy, in percent, of one setting."""

    tokens_per_pass: float
    accuracy: float


def area(points: Sequence[Point], best: float) -> float:
    """The area under a curve, in percent times tokens per pass.

    The first point counts as a rectangle. From point to point it is a trapezoid over the accuracy
    times min(exp(-3 (1 - accuracy / best)), 1). Points that are less accurate than the first by
    more than `MAX_LOSS` are left out.

    Args:
        points: The points, in any order; at least one.
        best: The best accuracy of any decoder, in percent.
    """
    first, *rest = sorted(points)
    kept = [first, *(point for point in rest if point.accuracy >= first.accuracy - MAX_LOSS)]
    heights = [
        point.accuracy * min(math.exp(-3 * (1 - point.accuracy / best)), 1.0) if best else 0.0
        for point in kept
    ]
    total = first.tokens_per_pass * first.accuracy
    for index in range(1, len(kept)):
        width = kept[index].tokens_per_pass - kept[index - 1].tokens_per_pass
        total += width * (heights[index] + heights[index - 1]) / 2
    return total


def settings(key: str) -> list[str]:
    """The settings of a decoder, its defaults first."""
    return [key, *(f"{key}:{parameters}" for parameters in SETTINGS.get(key, ()))]


def curves(rows: Sequence[Row], model: str) -> list[dict[str, Any]]:
    """One line per decoder of the results on one model, the largest area first."""
    lines = [line for line in overall(rows) if line["kind"] == "all" and line["passes_per_token"]]
    points = {
        line["method"]: Point(1 / line["passes_per_token"], 100 * line["accuracy"])
        for line in lines
    }
    speeds = {line["method"]: line["tokens"] / line["seconds"] for line in lines}
    best = max((point.accuracy for point in points.values()), default=0.0)
    seconds = {  # the median: other work on the machine may delay some questions
        method: median(row.seconds for row in rows if row.method == method) for method in points
    }
    results = []
    for key in dict.fromkeys(method.split(":")[0] for method in points):
        own = {method: points[method] for method in settings(key) if method in points}
        first = next(iter(own))
        results.append(
            {
                "decoder": key,
                "model": model,
                "aup": area([*own.values()], best),
                "accuracy": own[first].accuracy,
                "tokens_per_pass": own[first].tokens_per_pass,
                "seconds": seconds[first],
                "points": {
                    name: {**point._asdict(), "tokens_per_second": speeds[name]}
                    for name, point in own.items()
                },
            }
        )
    return sorted(results, key=lambda line: -line["aup"])


def crossing(points: Sequence[tuple[float, float]], speed: float) -> float | None:
    """Up to which accuracy the settings of a decoder are faster than `speed`.

    Where the accuracy that is reached at a speed or a higher one crosses `speed`, it is
    interpolated between two settings.

    Args:
        points: Tokens per second and accuracy of each setting, in any order.
        speed: The tokens per second to compare with.

    Returns:
        The accuracy; None if every setting is slower.
    """
    reached = -math.inf
    frontier: list[tuple[float, float]] = []  # from the fastest to the most accurate
    for point in sorted(points, reverse=True):
        if point[1] > reached:
            reached = point[1]
            frontier.append(point)
    faster = [point for point in frontier if point[0] >= speed]
    slower = frontier[len(faster) :]
    if not faster:
        return None
    if not slower:
        return faster[-1][1]
    (fast, low), (slow, high) = faster[-1], slower[0]
    return low + (high - low) * (fast - speed) / (fast - slow)


def compared(line: dict[str, Any], causal: dict[str, Any]) -> dict[str, Any]:
    """The line of a decoder with the accuracy up to which it is faster than the causal model."""
    found = [(one["tokens_per_second"], one["accuracy"]) for one in line["points"].values()]
    speed = causal["points"][CAUSAL]["tokens_per_second"]
    return {**line, "faster_up_to": crossing(found, speed)}


def _chosen(methods: str) -> list[str]:
    """The decoders to measure: the given ones, or all."""
    known = diffusion_methods()
    chosen = split_names(methods)
    for key in chosen:
        if key not in known:
            raise InvalidRequestError(
                f"{key!r} is no diffusion decoder; choose from {', '.join(known)}"
            )
    return chosen or known


def fits(key: str, is_uniform: bool) -> bool:
    """Whether a decoder is for models whose noise is random tokens, if the model is one."""
    return (_UNIFORM in catalogue.entries()[key].card.needs) == is_uniform


def bench_aup(
    models: Annotated[
        str, typer.Option("--models", help="Names or folders, separated by commas.")
    ] = "tiny-diffusion,tiny-blocks",
    uniform: Annotated[
        str, typer.Option("--uniform", help="The same of models whose noise is random tokens.")
    ] = "tiny-uniform",
    causal: Annotated[
        str | None,
        typer.Option(
            "--causal",
            help="A causal model that decodes with auto beside the others, such as the base model"
            " of an adapter.",
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="Keys, separated by commas; default: all.")
    ] = "",
    draft: Annotated[
        str, typer.Option("--draft", help="A draft model, for decoders that need one.")
    ] = "tiny-autoregressive",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; default: all.")
    ] = "",
    count: Annotated[int, typer.Option("--count", min=1, help="Examples per task and length.")] = 4,
    tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, help="Most tokens of an answer: the canvas length."),
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the questions.")] = 0,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Questions per batch; times are divided by it.")
    ] = 1,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Print the area under the accuracy-parallelism curve, tokens per pass and seconds of every
    diffusion decoder, and with --causal where it crosses autoregressive decoding.

    Example: anydecode bench aup --count 2 --threads 1 --json aup.json
    """
    groups = questions(split_names(tasks) or [*TASKS], None, count, seed)
    keys = _chosen(methods)
    names = {name: False for name in split_names(models)} | dict.fromkeys(
        split_names(uniform), True
    )
    decoders = {
        name: [one for key in keys if fits(key, is_uniform) for one in settings(key)]
        for name, is_uniform in names.items()
    }
    decoders = {name: found for name, found in decoders.items() if found}
    options = {"max_tokens": tokens, "seed": seed, "temperature": 0.0}
    results: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    rows: dict[str, list[Row]] = {}
    left_out: dict[str, str] = {}
    num_runs = sum(map(len, decoders.values())) + (causal is not None) * len(decoders)
    with progress("tasks", num_runs * len(groups)) as bar:
        for name, found in decoders.items():
            skipped: dict[str, str] = {}
            with ExitStack() as stack:
                llm = stack.enter_context(LLM(name, draft=draft, threads=threads or None))
                runs = [(llm, one) for one in found]
                if causal is not None:
                    runs.append((stack.enter_context(LLM(causal, threads=threads or None)), CAUSAL))
                rows[name] = [
                    *measure_interleaved(
                        runs, groups, skipped, False, bar.advance, batch=batch, **options
                    )
                ]
            lines = curves([row for row in rows[name] if row.method != CAUSAL], name)
            for line in curves([row for row in rows[name] if row.method == CAUSAL], str(causal)):
                lines = [compared(one, line) for one in lines]
                beside.append({**line, "beside": name})
            results += lines
            left_out |= {
                f"{one} on {name}": why for one, why in skipped.items() if one in (*keys, CAUSAL)
            }
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "count": count,
        "questions": sum(len(group) for group in groups),
        **options,
        "batch": batch,
        "decoders": results,
        "causal": beside,
        "rows": {name: [asdict(row) for row in found] for name, found in rows.items()},
        "left_out": left_out,
    }
    if plot is not None:
        draw(report, plot)
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print a line per decoder and model; accuracy, tokens per pass and milliseconds are those of
    its default parameters, and "up to" are the most tokens per pass of its settings. Milliseconds
    are the median over questions. Beside a causal model, a line per setting follows."""
    from rich.table import Table

    console, machine = table_console(), report["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores: {report['questions']} questions, canvas"
        f" {report['max_tokens']}, {report['batch']} at a time"
    )
    table = Table(box=None)
    for name in ("decoder", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("AUP", "settings", "accuracy", "tokens/pass", "up to", "ms"):
        table.add_column(name, justify="right")
    for line in report["decoders"]:
        fastest = max(point["tokens_per_pass"] for point in line["points"].values())
        table.add_row(
            line["decoder"],
            line["model"],
            f"{line['aup']:.0f}",
            str(len(line["points"])),
            f"{line['accuracy']:.1f}",
            f"{line['tokens_per_pass']:.2f}",
            f"{fastest:.2f}",
            f"{1000 * line['seconds']:.1f}",
        )
    console.print(table)
    for line in report["causal"]:
        _print_comparison(console, line, report["decoders"])
    for name, reason in report["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)


def _print_comparison(
    console: Any, causal: dict[str, Any], lines: Sequence[dict[str, Any]]
) -> None:
    """Print accuracy and tokens per second of every setting on one model, beside those of the
    causal model, and where they cross."""
    from rich.table import Table

    point = causal["points"][CAUSAL]
    table = Table(box=None, title=f"{causal['beside']} beside {causal['model']}")
    table.add_column("decoder", no_wrap=True)
    for name in ("accuracy", "tokens/s", "of causal", "faster up to"):
        table.add_column(name, justify="right")
    speed = point["tokens_per_second"]
    table.add_row(f"{CAUSAL} (causal)", f"{point['accuracy']:.1f}", f"{speed:.1f}", "1.00", "")
    for line in lines:
        if line["model"] != causal["beside"]:
            continue
        limit = line["faster_up_to"]
        for name, one in line["points"].items():
            table.add_row(
                name,
                f"{one['accuracy']:.1f}",
                f"{one['tokens_per_second']:.1f}",
                f"{one['tokens_per_second'] / speed:.2f}",
                "" if name != line["decoder"] else "never" if limit is None else f"{limit:.1f}",
            )
    console.print(table)


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw accuracy over tokens per second: a panel per model, a line per decoder through its
    settings, and a point and a dashed line at the speed of the causal model."""
    models = list(dict.fromkeys(line["model"] for line in report["decoders"]))
    keys = list(dict.fromkeys(line["decoder"] for line in report["decoders"]))
    beside = {line["beside"]: line for line in report["causal"]}
    title = f"Accuracy against speed, canvas {report['max_tokens']}"
    with figure(file, title, rows=len(models), height=2.8) as panels:
        for panel, model in zip(panels, models, strict=True):
            for line in report["decoders"]:
                if line["model"] == model:
                    number = keys.index(line["decoder"])
                    points = sorted(
                        (one["tokens_per_second"], one["accuracy"])
                        for one in line["points"].values()
                    )
                    panel.plot(
                        [x for x, _ in points],
                        [y for _, y in points],
                        "o-" if number < len(COLOURS) else "s--",
                        color=COLOURS[number % len(COLOURS)],
                        label=line["decoder"],
                        markersize=4,
                    )
            if model in beside:
                point = beside[model]["points"][CAUSAL]
                panel.axvline(point["tokens_per_second"], color=INK, linestyle="--", linewidth=1)
                panel.plot(
                    point["tokens_per_second"], point["accuracy"], "*", color=INK,
                    label=f"{CAUSAL}, causal", markersize=9,
                )  # fmt: skip
            panel.set_title(model)
            panel.set_ylabel("accuracy, percent")
            panel.set_ylim(-5, 105)
        panels[-1].set_xlabel("tokens per second")
