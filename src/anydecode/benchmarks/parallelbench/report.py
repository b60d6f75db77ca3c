"""Tables and plot of the results of `anydecode bench parallelbench`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.table import Table

from anydecode.plots import COLOURS
from anydecode.tasks.tasks import TASKS

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.axis{stroke:#999}.grid{stroke:#ddd}"
    ".front{stroke:#999;fill:none;stroke-dasharray:4 3}.name{font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#777}.grid{stroke:#333}}"
)
_PANELS = (("determined", "one right answer"), ("dependent", "many right answers"))
_MAX_COLUMNS = 6
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 250, 48, 46, 40


def print_report(report: dict[str, Any]) -> None:
    """Print a table of all methods by kind of task, where "fewer" and "faster" are the ratios of
    passes and seconds to those of the first method; then accuracy, passes and milliseconds by task.
    A star marks lengths that the task was not trained on."""
    from rich.console import Console

    console, machine = Console(), report["machine"]
    if not console.is_terminal:
        console.width = 140
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


def to_svg(report: dict[str, Any]) -> str:
    """An SVG of accuracy over passes per token (logarithmic): one panel for tasks with one right
    answer and one for those with many, a point per method, the Pareto front dashed."""
    lines = report["overall"]
    methods = list(dict.fromkeys(line["method"] for line in lines))
    rates = [line["passes_per_token"] for line in lines] or [1.0]
    low, high = math.log2(min(rates)) - 0.15, math.log2(max(rates)) + 0.15
    high = max(high, low + 1)
    width = _LEFT + 2 * (_WIDTH + _GAP)
    rows = -(-len(methods) // 4)
    height = _TOP + _HEIGHT + 56 + 18 * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="Accuracy against passes per token"><style>{_STYLE}</style>',
        f'<text x="{_LEFT}" y="16">Accuracy against passes per token, {escape(report["model"])},'
        f" canvas {report['max_tokens']}, T={report['temperature']:g}</text>",
    ]
    for index, (kind, title) in enumerate(_PANELS):
        left = _LEFT + index * (_WIDTH + _GAP)
        parts += _frame(left, title, low, high)
        points = {}
        for line in lines:
            if line["kind"] == kind:
                x = left + _WIDTH * (math.log2(line["passes_per_token"]) - low) / (high - low)
                points[line["method"]] = x, _TOP + _HEIGHT * (1 - line["accuracy"]), line
        best = front([(x, -y) for x, y, _ in points.values()])
        corners = " ".join(f"{x:.1f},{-y:.1f}" for x, y in best)
        parts.append(f'<polyline class="front" points="{corners}"/>')
        for method, (x, y, line) in points.items():
            label = f"{method}: {line['accuracy']:.3f} at {line['passes_per_token']:.3f}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{_colour(methods, method)}">'
                f"<title>{escape(label)}</title></circle>"
                f'<text class="name" x="{x:.1f}" y="{y + 3:.1f}" text-anchor="middle"'
                f' style="fill:#fff;font-size:9px">{methods.index(method) + 1}</text>'
            )
    for index, method in enumerate(methods):
        x = _LEFT + (index % 4) * (width - _LEFT) / 4
        y = _TOP + _HEIGHT + 50 + 18 * (index // 4)
        parts.append(f'<circle cx="{x + 5:.0f}" cy="{y}" r="5" fill="{_colour(methods, method)}"/>')
        parts.append(
            f'<text class="name" x="{x + 14:.0f}" y="{y + 4}">{index + 1} {escape(method)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _frame(left: float, title: str, low: float, high: float) -> list[str]:
    parts = [f'<text x="{left}" y="{_TOP - 10}">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, kind = _TOP + _HEIGHT * (1 - share), "grid" if share else "axis"
        parts.append(
            f'<line class="{kind}" x1="{left}" x2="{left + _WIDTH}" y1="{y}" y2="{y}"/>'
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:g}</text>'
        )
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = left + _WIDTH * (power - low) / (high - low)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}"/>'
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">'
            f"{2.0**power:g}</text>"
        )
    middle = left + _WIDTH / 2
    parts.append(
        f'<text x="{middle}" y="{_TOP + _HEIGHT + 32}" text-anchor="middle">passes per token</text>'
    )
    return parts


def _colour(methods: Sequence[str], method: str) -> str:
    return COLOURS[methods.index(method) % len(COLOURS)]
