"""Tables and figure of the results of `anydecode bench speculative`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydecode.plots import COLOURS, INK, figure
from anydecode.report import table_console


def print_report(report: dict[str, Any]) -> None:
    """Print two tables per temperature, of all answers and of those that do not loop, with cold and
    warm results; then missing baselines, their settings, and memory."""
    from rich.table import Table

    machine, console = report["machine"], table_console()
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


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw the cold speed-ups at the first temperature, over all answers, as bars: a group per
    category, a bar per method, with its interval."""
    first = report["rows"][0]["temperature"] if report["rows"] else 0.0
    rows = [
        row
        for row in report["rows"]
        if row["temperature"] == first and row["loops"] and not row["warm"]
    ]
    categories = list(dict.fromkeys(row["category"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.8 / max(len(methods), 1)
    title = f"Speed-up over plain decoding: {report['model']}, T={first:g}"
    with figure(file, title, height=3.0) as (panel,):
        for number, method in enumerate(methods):
            chosen = [row for row in rows if row["method"] == method]
            offset = (number - (len(methods) - 1) / 2) * width
            centres = [categories.index(row["category"]) + offset for row in chosen]
            values = [row["speedup"] for row in chosen]
            errors = [
                [max(0.0, row["speedup"] - row["interval"][0]) for row in chosen],
                [max(0.0, row["interval"][1] - row["speedup"]) for row in chosen],
            ]
            panel.bar(
                centres,
                values,
                width * 0.9,
                yerr=errors,
                ecolor=INK,
                color=COLOURS[number % len(COLOURS)],
                label=method,
            )
        panel.axhline(1.0, color=INK, linewidth=1)
        panel.grid(axis="x", visible=False)
        panel.set_xticks(
            range(len(categories)), categories, rotation=25, ha="right", rotation_mode="anchor"
        )
