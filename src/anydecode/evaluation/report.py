"""Where the figures of a benchmark go: tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all figures here; - for stdout."),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Write an SVG here.")]


def write_report(report: dict[str, Any], file: Path | None, show: Callable[[], None]) -> None:
    """`show` the report, and write it as JSON into `file`; where that is "-", JSON on stdout is all
    there is."""
    if file == Path("-"):
        print(json.dumps(report))
        return
    show()
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
