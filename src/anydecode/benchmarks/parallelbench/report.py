"""Tables and plot of the results of `anydecode bench parallelbench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from anydecode.plots import COLOURS, INK, figure
from anydecode.report import table_console
from anydecode.tasks.tasks import TASKS

_PANELS = (("determined", "one right answer"), ("dependent", "many right answers"))
_MAX_COLUMNS = 6
_MARKERS = "os^D"


def print_report(report: dict[str, Any]) -> None:
    """Print a table of all methods by kind of task, where "fewer" and "faster" are the ratios of
    passes and seconds to those of the first method; then accuracy, passes and milliseconds by task.
    A star marks lengths that the task was not trained on."""
    console, machine = table_console(), report["machine"]
    console.print(
        f"{report['model']} on {machine['cpu']}, {machine['cores']} cores:"
        f" {report['count']} held-out questions per task and length, canvas {report['max_tokens']},"
        f" T={report['temperature']:g}"
    )
    table = Table(box=None)
    for name in ("method", "tasks"):
        table.add_column(name, no_wrap=True)
    columns = ("accuracy", "strict", "passes", "fewer", "passes/token", "rows", "ms", "faster")
    for name in columns:
        table.add_column(name, justify="right")
    first = {line["kind"]: line for line in reversed(report["overall"])}
    for line in report["overall"]:
        table.add_row(
            line["method"],
            line["kind"],
            f"{line['accuracy']:.3f}",
            f"{line['strict']:.3f}",
            f"{line['passes']:.2f}",
            f"{first[line['kind']]['passes'] / line['passes']:.2f}x",
            f"{line['passes_per_token']:.3f}",
            f"{line['rows']:.0f}",
            f"{1000 * line['seconds']:.1f}",
            f"{first[line['kind']]['seconds'] / line['seconds']:.2f}x",
        )
    console.print(table)
    methods = list(dict.fromkeys(row["method"] for row in report["rows"]))
    for start in range(0, len(methods), _MAX_COLUMNS):
        console.print(_by_task(report["rows"], methods[start : start + _MAX_COLUMNS]))
    for method, reason in report["left_out"].items():
        console.print(f"skipped: {method}: {reason}", highlight=False)


def _by_task(rows: list[dict[str, Any]], methods: list[str]) -> Table:
    table = Table(box=None, title="accuracy (passes) ms", title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("n", justify="right")
    for method in methods:
        table.add_column(method, justify="right")
    cells = {(row["task"], row["length"], row["method"]): row for row in rows}
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        method_rows = [cells.get((task, length, method)) for method in methods]
        star = "*" if length == TASKS[task].held_out else ""
        table.add_row(task, f"{length}{star}", *(_cell(row) if row else "" for row in method_rows))
    return table


def _cell(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.2f} ({row['passes']:.1f}) {1000 * row['seconds']:.1f}"


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points (cost, value): lower cost and higher value are better."""
    front_points: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front_points or point[1] > front_points[-1][1]:
            front_points.append(point)
    return front_points


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw accuracy over passes per token (logarithmic): one panel for tasks with one right answer
    and one for those with many, a numbered point per method, the Pareto front dashed."""
    lines = report["overall"]
    methods = list(dict.fromkeys(line["method"] for line in lines))
    title = (
        f"Accuracy against passes per token: {report['model']}, canvas {report['max_tokens']},"
        f" T={report['temperature']:g}"
    )
    with figure(file, title, rows=2, height=2.6, share_x=True) as panels:
        for panel, (kind, name) in zip(panels, _PANELS, strict=True):
            points = {
                methods.index(line["method"]): (line["passes_per_token"], line["accuracy"])
                for line in lines
                if line["kind"] == kind
            }
            best = front(list(points.values()))
            panel.plot([x for x, _ in best], [y for _, y in best], "--", color=INK, linewidth=1)
            for number, (x, y) in points.items():
                marker = _MARKERS[number // len(COLOURS) % len(_MARKERS)]
                colour = COLOURS[number % len(COLOURS)]
                label = f"{number + 1} {methods[number]}"
                panel.plot(x, y, marker, color=colour, label=label)
            for numbers, top in _groups(points):
                text = " ".join(str(number + 1) for number in numbers)
                panel.annotate(
                    text, top, (0, 6), textcoords="offset points", fontsize=8, ha="center"
                )
            panel.set_title(name)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_ylim(-0.05, 1.12)
            panel.set_ylabel("accuracy")
        panels[1].set_xlabel("passes per token")


def _groups(
    points: dict[int, tuple[float, float]],
) -> Iterator[tuple[list[int], tuple[float, float]]]:
    """Points that are so near to each other that they share a label: their numbers from left to
    right, and the place of the label, above their middle."""
    remaining = sorted(points, key=lambda number: points[number])
    while remaining:
        group = [remaining.pop(0)]
        for number in list(remaining):
            x, y = points[group[-1]]
            if points[number][0] < 1.25 * x and abs(points[number][1] - y) < 0.1:
                group.append(number)
                remaining.remove(number)
        middle = points[group[len(group) // 2]][0]
        yield group, (middle, max(points[number][1] for number in group))
