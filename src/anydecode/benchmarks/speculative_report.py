"""Tables and figure of the results of `anydecode bench speculative`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydecode.benchmarks.speculative_answers import MULTI_STEP
from anydecode.plots import COLOURS, INK, figure
from anydecode.report import table_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


#: Maximum width of printed text, in columns.
TEXT_WIDTH = 100


def print_report(report: dict[str, Any]) -> None:
    """Print two tables of single answers per temperature, first of those that do not loop, then of
    all, with cold and warm results; a table of groups; then texts that differ from plain
    decoding's, missing baselines, their settings, and memory."""
    machine, console = report["machine"], table_console()
    _print_text(
        console,
        f"{machine['cpu']}, {machine['cores']} cores; {report['model']}, {report['tokens']} tokens,"
        f" {report['data']}; draft policy: {report['drafting']}",
    )
    _print_text(
        console,
        "Speed of single answers over plain decoding's and over multi-step decoding's: mean of the"
        " prompts and its 95% interval; of the ratios to multi-step also the smallest and the 5th"
        " percentile. per pass: tokens; warm: over plain, drafter state kept; cost: over plain by"
        " the cost model; draft: share of time. The line of a method is the mean over categories.",
    )
    for temperature in dict.fromkeys(row["temperature"] for row in report["rows"]):
        for loops in (False, True):
            _print_answers(console, report["rows"], temperature, loops)
    if report["company"]:
        _print_company(console, report["company"])
    for line in _differences(report):
        console.print(line, highlight=False)
    for name, draft in report.get("drafts", {}).items():
        console.print(f"{f'@{name}' if name else 'draft model'}: {draft}", highlight=False)
    for method, names in report.get("draft_models", {}).items():
        if names:
            console.print(f"{method}: draft model {', '.join(names)}", highlight=False)
    for engine, reason in report.get("missing", {}).items():
        console.print(f"{engine}: missing ({reason})", highlight=False)
    for engine, settings in report.get("baselines", {}).items():
        if settings:
            console.print(f"{engine}: {settings}", highlight=False)
    for method, extra in report["memory"].items():
        console.print(f"{method}: {extra / 2**20:.2f} MiB beyond plain", highlight=False)


def _print_text(console: Console, text: str) -> None:
    console.print(text, highlight=False, width=min(console.width, TEXT_WIDTH))


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table whose first columns, `left`, are names, and the others numbers."""
    from rich.table import Table

    table = Table(title=title, box=None, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold", vertical="top")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_answers(
    console: Console, rows: Sequence[dict[str, Any]], temperature: float, loops: bool
) -> None:
    """One table: of each method, the mean over categories, then its categories."""
    kind = "all answers" if loops else "answers that do not loop"
    table = _table(
        f"T={temperature:g}, {kind}",
        ["method,\ncategory"],
        ["n", "per\npass", "over\nplain", "\n95%", "over\nmulti", "\n95%", "\nmin", "\n5th",
         "\nwarm", "\ncost", "\ndraft"],
    )  # fmt: skip
    warm = {_row_key(row): row for row in rows if row["warm"]}
    shown = [
        row
        for row in rows
        if (row["temperature"], row["loops"], row["warm"]) == (temperature, loops, False)
    ]
    for row in sorted(shown, key=lambda row: _first_of_method(row, shown)):
        table.add_row(*_cells(row, warm.get(_row_key(row))))
    console.print(table)


def _first_of_method(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[int, bool]:
    """Sorts rows by method, in their order, and within a method "overall" first."""
    methods = [one["method"] for one in rows]
    return methods.index(row["method"]), row["category"] != "overall"


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["loops"], row["method"], row["category"]


def _cells(row: dict[str, Any], warm: dict[str, Any] | None) -> list[str]:
    is_overall = row["category"] == "overall"
    return [
        row["method"] if is_overall else f" {row['category']}",
        str(row["prompts"]),
        f"{row['tokens_per_pass']:.2f}" if row["tokens_per_pass"] else "",
        *_ratio_cells(row)[:2],
        *_ratio_cells(row["over_multi_step"], row["method"]),
        f"{warm['speedup']:.2f}" if warm else "",
        f"{row['modelled']:.2f}" if row["modelled"] else "",
        f"{100 * row['draft_share']:.1f}%" if row["tokens_per_pass"] else "",
    ]


def _ratio_cells(ratio: dict[str, Any], method: str = "") -> list[str]:
    """Mean, interval, smallest and fifth percentile of a ratio; empty for `multi-step`, which is
    compared with itself."""
    if method == MULTI_STEP:
        return [""] * 4
    interval = ratio["interval"]
    return [
        f"{ratio['speedup']:.2f}",
        "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        f"{ratio['smallest']:.2f}",
        f"{ratio['fifth_percentile']:.2f}",
    ]


def _print_company(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A table of the groups of all temperatures."""
    _print_text(
        console,
        "Prompts answered together, looping answers included: tokens per second, and their ratio to"
        " those of multi-step decoding: mean of the groups, its 95% interval, smallest, 5th"
        " percentile. The prompts are in the target's prefix cache for every method; 1 together:"
        " the single answers.",
    )
    table = _table(
        "", ["T", "method"],
        ["together", "groups", "tokens/s", "over\nmulti", "\n95%", "\nmin", "\n5th"],
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row['temperature']:g}",
            row["method"],
            str(row["together"]),
            str(row["groups"]),
            f"{row['tokens_per_second']:.1f}",
            *_ratio_cells(row["over_multi_step"], row["method"]),
        )
    console.print(table)


def _differences(report: dict[str, Any]) -> Iterator[str]:
    """A line for each method whose texts are not all those of plain decoding."""
    for row in report["rows"]:
        is_own = row["tokens_per_pass"] > 0  # the texts of other engines are not compared
        if row["loops"] and row["category"] == "overall" and is_own:
            if num := row["prompts"] - row["same_text"]:
                kind = ", warm" if row["warm"] else ""
                yield (
                    f"{row['method']}{kind}, T={row['temperature']:g}: {num} of {row['prompts']}"
                    " texts differ from plain decoding's"
                )
    for row in report["company"]:
        num_texts = row["together"] * row["groups"]
        if num := num_texts - row["same_text"]:
            yield (
                f"{row['method']}, {row['together']} together, T={row['temperature']:g}: {num} of"
                f" {num_texts} texts differ from plain decoding's"
            )


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw the cold speed-ups at the first temperature, over answers that do not loop, as bars: a
    group per category, a bar per method, with its interval if there are several prompts."""
    first = report["rows"][0]["temperature"] if report["rows"] else 0.0
    rows = [
        row
        for row in report["rows"]
        if row["temperature"] == first and not row["loops"] and not row["warm"]
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
            ends = [row["interval"] or [row["speedup"]] * 2 for row in chosen]
            errors = [
                [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)],
                [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)],
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
