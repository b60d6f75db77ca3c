"""Output of benchmark results: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all results to this file as JSON; - for stdout."
    ),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Write a plot to this file as SVG.")]


def write_report(report: dict[str, Any], file: Path | None, show: Callable[[], None]) -> None:
    """Calls `show` to print the report, and writes it as JSON to `file` if given. If `file` is "-",
    only JSON is printed, to stdout."""
    if file == Path("-"):
        print(json.dumps(report))
        return
    show()
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
