"""`anydecode bench quantization`: quality loss of a diffusion model in the engine's number formats.

Quantisation shifts confidences, and with them the effect of thresholds, so formats are compared at
the same number of passes. They are also compared by the cross-entropy of masked tokens, whose mean
over the masked share bounds the negative log-likelihood per token.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.benchmarks.parallelbench.bench import questions
from anydecode.certification.format_loss import (
    SHARES,
    measure,
)
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.quantization.dlm_ptq import FORMATS
from anydecode.report import JsonFile, split_names, table_console, write_report
from anydecode.tasks.tasks import TASKS, examples


def bench_quantization(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "tiny-diffusion"
    ),
    formats: Annotated[
        str,
        typer.Option("--formats", help=f"Any of {', '.join(FORMATS)}; the first is the reference."),
    ] = ",".join(FORMATS),
    method: Annotated[
        str,
        typer.Option(
            "--method", help="A decoder whose number of passes does not depend on the model."
        ),
    ] = "llada:block=0,steps=8",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; empty: all.")
    ] = "",
    count: Annotated[int, typer.Option("--count", min=1, help="Examples per task and length.")] = 6,
    tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, help="Most tokens of an answer: the canvas length."),
    ] = 32,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of questions, masks and calibration.")
    ] = 0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the quality loss of a diffusion model in fewer bits, at equal passes.

    Example: anydecode bench quantization --formats float32,int8,int4 --count 4
    """
    chosen = split_names(formats)
    for name in chosen:
        if name not in FORMATS:
            raise InvalidRequestError(f"unknown format {name!r}; choose from {', '.join(FORMATS)}")
    if not chosen:
        raise InvalidRequestError("give at least one format")
    task_names = split_names(tasks) or [*TASKS]
    groups = questions(task_names, None, count, seed)
    calibration = [
        one for task in task_names for one in examples(task, 2 * count, seed=seed, held_out=False)
    ]
    rows = [
        *measure(
            model,
            chosen,
            method,
            groups,
            calibration,
            threads=threads or None,
            seed=seed,
            max_tokens=tokens,
        )
    ]
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "method": method,
        "max_tokens": tokens,
        "questions": sum(map(len, groups)),
        "seed": seed,
        "formats": [asdict(row) for row in rows],
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print one line per format."""
    from rich.table import Table

    console = table_console()
    console.print(
        f"{report['model']}, {report['method']}: {report['questions']} held-out questions",
        highlight=False,
    )
    table = Table(box=None)
    table.add_column("format", no_wrap=True)
    shares = [f"nats at {share:g}" for share in SHARES]
    for name in ("MiB", *shares, "bound", "accuracy", "passes", "differing"):
        table.add_column(name, justify="right")
    for row in report["formats"]:
        table.add_row(
            row["format"],
            f"{row['bytes'] / 2**20:.2f}",
            *(f"{value:.4f}" for value in row["entropy"].values()),
            f"{row['bound']:.4f}",
            f"{row['accuracy']:.3f}",
            f"{row['passes']:.2f}",
            f"{row['differing']:.4f}",
        )
    console.print(table)
