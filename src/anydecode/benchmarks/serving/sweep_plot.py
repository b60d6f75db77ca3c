"""Plots a sweep of rates as SVG: share of requests that met the objective, and latency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from html import escape
from typing import Any

from anydecode.benchmarks.serving.replay import Objective
from anydecode.plots import COLOURS

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 130, 56, 76, 58
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.small{font-size:11px}.grid{stroke:#ddd}.axis{stroke:#999}"
    ".limit{stroke:#777;stroke-dasharray:2 3}polyline{fill:none;stroke-width:2}"
    ".p99{stroke-dasharray:6 4}@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#333}"
    ".axis{stroke:#777}.limit{stroke:#999}}"
)

#: Values by rate.
Line = dict[float, float]


def sweep_svg(
    title: str, servers: dict[str, Any], rates: list[float], objective: Objective, share: float
) -> str:
    """An SVG with three panels over the rate (requests per second, logarithmic), one colour per
    server: the share of requests that met the objective, TTFT and TPOT (median solid, 99th
    percentile dashed). A point is the median over the rounds that tried its rate; rates that a
    search skipped have none."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(servers)}
    rows = -(-len(servers) // 2)
    top = _TOP + 18 * (rows - 1)
    panels = [
        _panel(
            f"share of the requests that met the objective (target: {share:.0%})",
            {name: [_line(one, "attainment")] for name, one in servers.items()},
            rates, colours, share, None,
        ),
        *(
            _panel(
                f"time {what}, median and 99th percentile (dashed)",
                {
                    name: [_line(server_results, kind, percentile) for percentile in ("p50", "p99")]
                    for name, server_results in servers.items()
                },
                rates, colours, limit, "s",
            )
            for kind, what, limit in (
                ("ttft", "to the first token", objective.ttft),
                ("tpot", "per token", objective.tpot),
            )
        ),
    ]  # fmt: skip
    height = top + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}"'
        f' role="img" aria-label="Objective met and latency by rate"><style>{_STYLE}</style>',
        f'<text x="8" y="16">{escape(title)}</text>',
    ]
    for index, (name, colour) in enumerate(colours.items()):
        x, y = 8 + index % 2 * 230, 34 + index // 2 * 18
        parts.append(f'<circle cx="{x + 5}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(name)}</text>')
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT} {top + index * (_HEIGHT + _GAP)})">')
        parts += [*panel, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _line(server_results: dict[str, Any], *names: str) -> Line:
    """Median over rounds of one result, by rate; `names` is the path to it in each run."""
    values_by_rate: dict[float, list[float]] = {}
    for run in server_results["runs"]:
        value = run
        for name in names:
            value = value[name]
        if value is not None:
            values_by_rate.setdefault(run["rate"], []).append(value)
    return {rate: statistics.median(values) for rate, values in sorted(values_by_rate.items())}


def _panel(
    title: str,
    curves: dict[str, list[Line]],
    rates: list[float],
    colours: dict[str, str],
    limit: float,
    unit: str | None,
) -> list[str]:
    """One panel with its upper left corner at the origin: shares if `unit` is None, else times on a
    logarithmic scale."""
    x = _log_scale(min(rates), max(rates), 0.0, _WIDTH)
    values = [value for lines in curves.values() for line in lines for value in line.values()]
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    y: Callable[[float], float] = _share_to_y
    if unit is not None:
        plotted = [max(value, 1e-5) for value in values] + [limit] * math.isfinite(limit)
        low = math.floor(math.log10(min(plotted, default=0.01)))
        high = max(low + 1, math.ceil(math.log10(max(plotted, default=1.0))))
        ticks = [10.0**power for power in range(low, high + 1)]
        y = _log_scale(ticks[0], ticks[-1], _HEIGHT, 0.0)
    parts = [f'<text x="{-_LEFT + 8}" y="-12">{escape(title)}</text>']
    for tick in ticks:
        kind = "grid" if tick > ticks[0] else "axis"
        label = f"{tick:.0%}" if unit is None else f"{tick:g} {unit}"
        parts.append(
            f'<line class="{kind}" x1="0" x2="{_WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
            f'<text class="small" x="-6" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for rate in sorted(set(rates)):
        parts.append(
            f'<line class="grid" x1="{x(rate):.1f}" x2="{x(rate):.1f}" y1="0" y2="{_HEIGHT}"/>'
            f'<text class="small" x="{x(rate):.1f}" y="{_HEIGHT + 15}" text-anchor="middle">'
            f"{rate:g}/s</text>"
        )
    if math.isfinite(limit):
        limit_y = y(limit)
        parts.append(
            f'<line class="limit" x1="0" x2="{_WIDTH}" y1="{limit_y:.1f}" y2="{limit_y:.1f}"/>'
        )
    for name, lines in curves.items():
        for dashed, line in enumerate(lines):
            points = [(x(rate), y(value)) for rate, value in line.items()]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            kind = "p99" if dashed else "middle"
            parts.append(f'<polyline class="{kind}" points="{corners}" stroke="{colours[name]}"/>')
            for (a, b), value in zip(points, line.values(), strict=True):
                label_text = f"{value:.0%}" if unit is None else f"{value:.3g} {unit}"
                parts.append(
                    f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colours[name]}">'
                    f"<title>{escape(name)}: {label_text}</title></circle>"
                )
    return parts


def _share_to_y(share: float) -> float:
    return _HEIGHT * (1 - share)


def _log_scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """A logarithmic scale that maps `low` to `start` and `high` to `stop`; a single value is
    centred."""

    def index(value: float) -> float:
        if low == high:
            return (start + stop) / 2
        share = math.log(max(value, low) / low) / math.log(high / low)
        return start + (stop - start) * share

    return index
