"""`anydecode bench aup`: the area under the accuracy-parallelism curve of every diffusion decoder
(AUP; Qian et al., "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation").

A curve has a point for each of several settings of a decoder: the tokens per forward pass and the
accuracy. All passes are counted, those that open a block, write a cache or verify a draft too; the
tokens are those of the answer, with its end, without the padding behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
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
from anydecode.progress import progress
from anydecode.report import JsonFile, split_names, table_console, write_report
from anydecode.tasks.tasks import TASKS

#: Points that are less accurate than the first by more than this, in percent, are left out.
MAX_LOSS = 5.0
_THRESHOLDS = ("threshold=0.99", "threshold=0.8", "threshold=0.6", "threshold=0.4")
_STEPS = ("steps=16", "steps=8", "steps=4", "steps=2", "steps=1")
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
    **dict.fromkeys(("dream", "dream-coder", "gidd", "llada", "p2", "remdm", "remedi"), _STEPS),
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
    lines = [line for line in overall(rows) if line["kind"] == "all"]
    points = {
        line["method"]: Point(1 / line["passes_per_token"], 100 * line["accuracy"])
        for line in lines
        if line["passes_per_token"]
    }
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
                "points": {name: point._asdict() for name, point in own.items()},
            }
        )
    return sorted(results, key=lambda line: -line["aup"])


def _keys(methods: str) -> tuple[list[str], dict[str, str]]:
    """The decoders to measure (the given ones, or all that the shipped models are for), and why
    others are not."""
    known = diffusion_methods()
    chosen = split_names(methods)
    for key in chosen:
        if key not in known:
            raise InvalidRequestError(
                f"{key!r} is no diffusion decoder; choose from {', '.join(known)}"
            )
    if chosen:
        return chosen, {}
    left_out = {
        key: "needs a model whose noise is random tokens"
        for key in known
        if "uniform-state diffusion model" in catalogue.entries()[key].card.needs
    }
    return [key for key in known if key not in left_out], left_out


def bench_aup(
    models: Annotated[
        str, typer.Option("--models", help="Names or folders, separated by commas.")
    ] = "tiny-diffusion,tiny-blocks",
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
    json_file: JsonFile = None,
) -> None:
    """Print the area under the accuracy-parallelism curve, tokens per pass and seconds of every
    diffusion decoder.

    Example: anydecode bench aup --count 2 --threads 1 --json aup.json
    """
    groups = questions(split_names(tasks) or [*TASKS], None, count, seed)
    keys, left_out = _keys(methods)
    decoders = [one for key in keys for one in settings(key)]
    names = split_names(models)
    options = {"max_tokens": tokens, "seed": seed, "temperature": 0.0}
    results: list[dict[str, Any]] = []
    rows: dict[str, list[Row]] = {}
    with progress("tasks", len(decoders) * len(groups) * len(names)) as bar:
        for name in names:
            skipped: dict[str, str] = {}
            with LLM(name, draft=draft, threads=threads or None) as llm:
                rows[name] = [
                    *measure_interleaved(
                        llm, decoders, groups, skipped, False, bar.advance, batch=batch, **options
                    )
                ]
            results += curves(rows[name], name)
            left_out |= {f"{one} on {name}": why for one, why in skipped.items() if one in keys}
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "count": count,
        "questions": sum(len(group) for group in groups),
        **options,
        "batch": batch,
        "decoders": results,
        "rows": {name: [asdict(row) for row in found] for name, found in rows.items()},
        "left_out": left_out,
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print a line per decoder and model; accuracy, tokens per pass and milliseconds are those of
    its default parameters, and "up to" are the most tokens per pass of its settings. Milliseconds
    are the median over questions."""
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
    for name, reason in report["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)
