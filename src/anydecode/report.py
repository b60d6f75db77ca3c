"""Output of benchmark results: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.errors import InvalidRequestError
from anydecode.plots import usable_file

if TYPE_CHECKING:
    from rich.console import Console


def _usable_json(file: Path | None) -> Path | None:
    """Refuses a file in a folder that does not exist before the work whose results it gets."""
    if file is not None and not file.parent.is_dir():
        raise InvalidRequestError(f"--json is {file}; the folder {file.parent} does not exist")
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all results to this file as JSON; - for stdout.",
        callback=_usable_json,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        callback=usable_file,
        help="Draw a figure to this .svg, .png or .pdf file; needs the extra plots.",
    ),
]


def split_names(text: str) -> list[str]:
    """The names in `text`, which are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_methods(text: str) -> list[str]:
    """Split keys at commas or semicolons. `name=value` after a comma is a parameter of the
    preceding key ("fast-dllm:threshold=0.8,block=8,prophet")."""
    methods: list[str] = []
    for part in split_names(text.replace(";", ",")):
        if methods and "=" in part and ":" not in part.split("=")[0]:
            methods[-1] += f",{part}"
        else:
            methods.append(part)
    return methods


def table_console() -> Console:
    """A console for tables on stdout: as wide as the terminal, or wide enough for all columns."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 140
    return console


def with_error(figure: tuple[float, float]) -> str:
    """A mean and its standard error."""
    mean, error = figure
    return f"{mean:.4f} ± {error:.4f}"


def write_report(report: dict[str, Any], file: Path | None, show: Callable[[], None]) -> None:
    """Calls `show` to print the report, and writes it as JSON to `file` if given. If `file` is "-",
    only JSON is printed, to stdout."""
    if file == Path("-"):
        print(json.dumps(report))
        return
    if file is not None:  # first, as the reader of the table may have closed the pipe
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show()
