"""Output to stdout (results, JSON) and to stderr (notes, progress)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anydecode.serialization import to_plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    print(json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False))


def note(message: str) -> None:
    """Print a line to stderr."""
    print(message, file=sys.stderr)


def write_now(text: str) -> None:
    """Write streamed text to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner on stderr, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr_console().status(message):
        yield


@contextmanager
def progress(*, of_bytes: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr, if it is a terminal. `of_bytes` shows sizes and transfer
    speed.
    """
    from rich import progress as rich_progress

    columns: list[Any] = ["{task.description}", rich_progress.BarColumn()]
    if of_bytes:
        columns += [rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn()]
    else:
        columns += [rich_progress.MofNCompleteColumn(), rich_progress.TimeElapsedColumn()]
    console = stderr_console()
    with rich_progress.Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # redirected output must not appear in the terminal
    ) as bar:
        yield bar
