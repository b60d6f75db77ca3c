"""`anydecode bench cost`: the time of a forward pass over n rows on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from anydecode.engine.costs import CONTEXTS, ROWS, measure
from anydecode.machine import cpu_name, usable_cores
from anydecode.report import table_console
from anydecode.scoring.cost import CostTable

__all__ = ["CostTable", "bench_cost", "measure"]


def bench_cost(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder or .gguf file.")
    ] = ("smollm2-135m-instruct"),
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of timings of each pass.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Time passes of n rows after contexts of several lengths.

    Example: anydecode bench cost --threads 2 --json
    """
    from anydecode.models.opening import open_model

    loaded, _ = open_model(model, threads=threads or None)
    table = measure(loaded, ROWS, CONTEXTS, rounds)
    if as_json:
        print(json.dumps(table.to_dict()))
        return
    print_table(table, loaded.name)


def print_table(table: CostTable, name: str) -> None:
    """Prints milliseconds per pass, and the ratio to a pass of one row."""
    from rich.table import Table

    console = table_console()
    console.print(f"{name} on {cpu_name()}, {usable_cores()} cores: ms of a pass over n rows")
    shown = Table("context", *(f"n={count}" for count in ROWS), box=None)
    for context, line in sorted(table.seconds_by.items()):
        costs = [f"{line[n] * 1e3:.1f} ({line[n] / line[1]:.2f}x)" for n in ROWS]
        shown.add_row(str(context), *costs)
    console.print(shown)
