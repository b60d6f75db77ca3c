"""Tables and plot of the results of `anydecode bench speculative`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from itertools import count
from typing import Any

from anydecode.plots import COLOURS

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.axis{stroke:#999}.grid{stroke:#ddd}"
    ".whisker{stroke:#222;stroke-width:1.2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#777}.grid{stroke:#333}"
    ".whisker{stroke:#eee}}"
)


def note(message: str) -> None:
    """Print a line to stderr."""
    print(message, file=sys.stderr)


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; calling the value advances it. The description of a step is shown
    beside the bar, or printed as a line if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        done = count(1)

        def advance(step: str = "") -> None:
            bar.update(task, description=step or name, advance=1)
            if bar.disable and step:
                note(f"{next(done)} of {total} {name}: {step}")

        yield advance


def print_report(report: dict[str, Any]) -> None:
    """Print two tables per temperature, of all answers and of those that do not loop, with cold and
    warm results; then missing baselines, their settings, and memory."""
    from rich.console import Console
    from rich.table import Table

    machine, console = report["machine"], Console()
    if not console.is_terminal:
        console.width = 120
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; {report['model']}, {report['tokens']} tokens,"
        f" {report['data']}; speed-up over plain decoding, 95% interval, 5th percentile of prompts"
    )
    warm = {_row_key(row): row for row in report["rows"] if row["warm"]}
    for temperature in dict.fromkeys(row["temperature"] for row in report["rows"]):
        for loops in (True, False):
            title = f"T={temperature:g}, {'all answers' if loops else 'answers that do not loop'}"
            table = Table(title=title, box=None, title_justify="left")
            for name in ("method", "category"):
                table.add_column(name, no_wrap=True)
            for name in (
                "prompts",
                "tokens/pass",
                "speed-up",
                "interval",
                "5th",
                "warm",
                "modelled",
                "drafting",
            ):
                table.add_column(name, justify="right")
            for row in report["rows"]:
                if (row["temperature"], row["loops"], row["warm"]) == (temperature, loops, False):
                    table.add_row(*_cells(row, warm.get(_row_key(row))))
            console.print(table)
    for engine, reason in report.get("missing", {}).items():
        console.print(f"{engine}: missing ({reason})", highlight=False)
    for engine, settings in report.get("baselines", {}).items():
        if settings:
            console.print(f"{engine}: {settings}", highlight=False)
    for method, extra in report["memory"].items():
        console.print(f"{method}: {extra / 2**20:.2f} MiB beyond plain", highlight=False)


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["loops"], row["method"], row["category"]


def _cells(row: dict[str, Any], warm: dict[str, Any] | None) -> list[str]:
    low, high = row["interval"]
    return [
        row["method"],
        row["category"],
        str(row["prompts"]),
        f"{row['tokens_per_pass']:.2f}" if row["tokens_per_pass"] else "",
        f"{row['speedup']:.2f}x",
        f"{low:.2f}-{high:.2f}",
        f"{row['fifth_percentile']:.2f}",
        f"{warm['speedup']:.2f}x" if warm else "",
        f"{row['modelled']:.2f}x" if row["modelled"] else "",
        f"{100 * row['draft_share']:.1f}%" if row["tokens_per_pass"] else "",
    ]


def to_svg(report: dict[str, Any]) -> str:
    """An SVG bar chart of the cold speed-ups at the first temperature, over all answers: a group of
    bars per category, a bar per method, whiskers for the interval."""
    first = report["rows"][0]["temperature"] if report["rows"] else 0.0
    rows = [
        row
        for row in report["rows"]
        if row["temperature"] == first and row["loops"] and not row["warm"]
    ]
    categories = list(dict.fromkeys(row["category"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    bar, gap, left, top, height = 14, 22, 44, 46, 240
    group = bar * len(methods) + gap
    title = f"Speed-up over plain decoding, {report['model']}, T={first:g}"
    width = left + max(group * len(categories) + 20, 7 * len(title))  # up to 7 per letter
    max_value: float = max([row["interval"][1] for row in rows] + [1.5]) * 1.05

    def y(value: float) -> float:
        return top + height * (1 - value / max_value)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + height + 60}"'
        f' role="img" aria-label="Speed-up over plain decoding"><style>{_STYLE}</style>',
        f'<text x="{left}" y="16">{escape(title)}</text>',
    ]
    for index, method in enumerate(methods):
        x = left + index * ((width - left) / max(len(methods), 1))
        parts.append(f'<rect x="{x:.0f}" y="24" width="10" height="10" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="33">{escape(method)}</text>')
    step = 0.5 if max_value < 4 else 1.0
    for tick in range(int(max_value / step) + 1):
        tick_y = y(tick * step)
        line = "axis" if tick * step == 1 else "grid"
        parts.append(
            f'<line class="{line}" x1="{left}" x2="{width - 10}" y1="{tick_y}" y2="{tick_y}"/>'
        )
        parts.append(
            f'<text x="{left - 8}" y="{tick_y + 4}" text-anchor="end">{tick * step:g}</text>'
        )
    for row in rows:
        index = methods.index(row["method"])
        x = left + gap / 2 + categories.index(row["category"]) * group + index * bar
        value, (low, high), middle = row["speedup"], row["interval"], x + bar / 2 - 1
        parts.append(
            f'<rect x="{x}" y="{y(value):.1f}" width="{bar - 2}" height="{y(0) - y(value):.1f}"'
            f' fill="{_colour(index)}"><title>{escape(row["method"])},'
            f" {escape(row['category'])}:"
            f" {value:.2f}</title></rect>"
            f'<line class="whisker" x1="{middle}" x2="{middle}" y1="{y(low):.1f}"'
            f' y2="{y(high):.1f}"/>'
        )
    for index, category in enumerate(categories):
        x = left + group * (index + 0.5)
        parts.append(
            f'<text x="{x}" y="{top + height + 18}" text-anchor="end" transform="rotate(-25 {x}'
            f' {top + height + 18})">{escape(category)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
