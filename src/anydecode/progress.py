"""Progress of long work, and notes, on stderr: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

#: How an amount of work is printed: "3 of 106 methods", "45.0 of 98.0 MB of NAME", "34% of NAME".
Unit = Literal["count", "bytes", "percent"]

#: Without a terminal: seconds after which a line is printed although the step is the same.
LINE_SECONDS = 10.0


def note(message: str) -> None:
    """Print a line to stderr."""
    print(message, file=sys.stderr)


class Progress:
    """The state of some work. Made by `progress`, which shows it.

    Args:
        name: What is counted, in the plural ("methods"); what is measured, if the unit is bytes or
            percent.
        total: The amount of work in all; None if it is not known yet.
        unit: How amounts are printed.
        done: The amount that was done before.
    """

    def __init__(self, name: str, total: float | None, unit: Unit, done: float) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = done
        self.step = ""
        self.detail = ""
        self._start = self._shown_at = monotonic()
        self._skipped = done  # took no time, so the estimate must not count it

    def begin(self, step: str) -> None:
        """Name the step that begins now."""
        self.step, self.detail = step, ""
        self._show()

    def restart(self, name: str, done: float) -> None:
        """Begin work that is measured anew, with its own name and times, of which `done` was done
        before."""
        self.name, self.done, self.step, self.detail = name, done, "", ""
        self._skipped, self._start, self._shown_at = done, monotonic(), -inf
        self._show()

    def advance(self, step: str | None = None, *, skipped: bool = False) -> None:
        """Count one more unit of work. `skipped` work took no time, such as a result that was read
        from a file."""
        self._skipped += skipped
        self.update(self.done + 1, step=step)

    def update(
        self, done: float, total: float | None = None, *, step: str | None = None, detail: str = ""
    ) -> None:
        """Set the amount that is done, the total if it is known now, the step if it is another
        one, and a detail of the current state, such as a loss."""
        self.done, self.detail = done, detail
        self.total = self.total if total is None else total
        self.step = self.step if step is None else step
        self._show()

    def amount(self) -> str:
        """The amount that is done, of the total."""
        if self.unit == "percent":
            return f"{self.done / (self.total or 1):.0%} of {self.name}"
        size, end = (1e6, f" MB of {self.name}") if self.unit == "bytes" else (1, f" {self.name}")
        places = 1 if self.unit == "bytes" else 0
        of_total = "" if self.total is None else f" of {self.total / size:.{places}f}"
        return f"{self.done / size:.{places}f}{of_total}{end}"

    def times(self) -> str:
        """The elapsed time, and an estimate of the remaining time."""
        elapsed = monotonic() - self._start
        if self.total is None or self.done >= self.total or self.done <= self._skipped:
            return duration(elapsed)
        remaining = elapsed * (self.total - self.done) / (self.done - self._skipped)
        return f"{duration(elapsed)}, about {duration(remaining)} left"

    def _show(self) -> None:
        """Show the state; it has changed."""


def duration(seconds: float) -> str:
    """`seconds` in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Lines(Progress):
    """Prints a line when a step begins, when `LINE_SECONDS` have passed, and at the end."""

    _shown_step = ""
    _shown_amount = ""

    def _show(self) -> None:
        now = monotonic()
        is_over = self.total is not None and self.done >= self.total
        is_end = is_over and self.amount() != self._shown_amount
        if self.step != self._shown_step or is_end or now >= self._shown_at + LINE_SECONDS:
            self._shown_step, self._shown_at, self._shown_amount = self.step, now, self.amount()
            parts = filter(None, (self.step, self.detail, self.times()))
            note(f"{self.amount()}: {', '.join(parts)}")


@contextmanager
def progress(
    name: str, total: float | None = None, *, unit: Unit = "count", done: float = 0
) -> Iterator[Progress]:
    """Show progress on stderr within a block; the parameters are those of `Progress`."""
    if not sys.stderr.isatty():
        yield _Lines(name, total, unit, done)
        return
    from rich import progress as bars
    from rich.table import Column
    from rich.text import Text

    class Bar(Progress):
        def _show(self) -> None:
            bar.update(task, completed=self.done, total=self.total)

    class State(bars.ProgressColumn):
        """The step and its detail, or the amount and the times."""

        def __init__(self, is_step: bool) -> None:
            super().__init__(Column(no_wrap=True, max_width=28 if is_step else None))
            self.is_step = is_step

        def render(self, task: bars.Task) -> Text:
            if self.is_step:
                step = ", ".join(filter(None, (state.step, state.detail)))
                return Text(step, overflow="ellipsis")
            return Text(f"{state.amount()}, {state.times()}")

    state = Bar(name, total, unit, done)
    bar = bars.Progress(
        State(is_step=True),
        bars.BarColumn(bar_width=None),
        State(is_step=False),
        console=_console(),
        expand=True,
        redirect_stdout=sys.stdout.isatty(),  # redirected output must not appear in the terminal
    )
    with bar:
        task = bar.add_task("", total=total, completed=int(done))
        yield state


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner on stderr within a block, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with _console().status(message):
        yield


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
