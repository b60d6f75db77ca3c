"""Jobs for worker processes, which import this module by its name."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep
from typing import Any

from anydecode.errors import ConstraintError


class Table:
    """An object that is loaded into a process once."""

    def __init__(self, value: int) -> None:
        self.value = value


def add(table: Table, number: int) -> tuple[int, int]:
    """The sum, and the process."""
    return table.value + number, os.getpid()


def compute_forever(table: Table) -> None:
    """Takes processor time without end."""
    while True:
        pass


def grow(table: Table, size: int) -> int:
    """Allocates `size` bytes."""
    return len(bytearray(size))


def fail(table: Table) -> None:
    """Raises an error of the caller."""
    raise ConstraintError("no such thing")


def crash(table: Table) -> None:
    """Ends the process."""
    os._exit(7)


def wait_for(table: Table, path: str) -> str:
    """Waits until a file exists."""
    while not Path(path).exists():
        sleep(0.01)
    return path


def announce(table: Table, started: str, go: str) -> int:
    """Writes the id of the process to a file, waits until another exists, and returns the id."""
    part = Path(started).with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(started)
    wait_for(table, go)
    return os.getpid()


def niceness(table: Table) -> Any:
    """The niceness of the process."""
    return os.nice(0)
