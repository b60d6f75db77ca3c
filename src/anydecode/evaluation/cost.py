"""`anydecode bench cost`: what a pass over n rows costs on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from anydecode.engine.costs import CONTEXTS, ROWS, measure
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.scoring.cost import CostTable

__all__ = ["CostTable", "bench_cost", "measure"]


def bench_cost(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each is timed.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Time passes of n rows behind several lengths of context.

    Example: anydecode bench cost --threads 2 --json
    """
    from anydecode.models.opening import open_model

    opened, _ = open_model(model, threads=threads or None)
    table = measure(opened, ROWS, CONTEXTS, rounds)
    if as_json:
        print(json.dumps(table.to_dict()))
        return
    print_table(table, opened.name)


def print_table(table: CostTable, name: str) -> None:
    """Milliseconds of a pass, and how many passes of one row that is."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{name} on {cpu_name()}, {usable_cores()} cores: ms of a pass over n rows")
    shown = Table("context", *(f"n={count}" for count in ROWS), box=None)
    for context, line in sorted(table.seconds_by.items()):
        costs = [f"{line[n] * 1e3:.1f} ({line[n] / line[1]:.2f}x)" for n in ROWS]
        shown.add_row(str(context), *costs)
    console.print(shown)
