"""Figures of serving benchmarks: distributions of latencies at one rate, and results by rate."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from anydecode.benchmarks.serving.replay import Objective
from anydecode.plots import COLOURS, INK, figure, logarithmic

#: Times are drawn as at least this, in seconds, on their logarithmic axes.
_MIN_SECONDS = 1e-5


def draw_distributions(
    file: Path, title: str, panels: dict[str, dict[str, list[float]]], limits: dict[str, float]
) -> None:
    """Draw cumulative distributions of latencies.

    Args:
        file: The file of the figure.
        title: Title of the figure.
        panels: Seconds by panel and by server; a server without values has no curve.
        limits: The objective of a panel, in seconds, if it has one.
    """
    with figure(file, title, rows=len(panels)) as axes:
        colours: dict[str, str] = {}
        for panel, (name, servers) in zip(axes, panels.items(), strict=True):
            panel.set_title(name)
            for server, values in servers.items():
                if not values:
                    continue
                colour = colours.setdefault(server, COLOURS[len(colours) % len(COLOURS)])
                seconds = sorted(max(value, _MIN_SECONDS) for value in values)
                panel.ecdf(seconds, color=colour, label=server)
            _draw_limit(panel, limits.get(name, math.inf), vertical=True)
            logarithmic(panel, "x", " s")
            panel.yaxis.set_major_formatter("{x:.0%}")
        axes[-1].set_xlabel("dotted: the objective")


def draw_sweep(
    file: Path, title: str, servers: dict[str, Any], objective: Objective, share: float
) -> None:
    """Draw three panels over the rate, one colour per server: the share of requests that met the
    objective, time to the first token and time per token (median solid, 99th percentile dashed). A
    point is the median over the rounds that tried its rate; rates that a search skipped have
    none."""
    with figure(file, title, rows=3, share_x=True) as axes:
        names = ("share that met the objective", "time to the first token", "time per token")
        limits = (share, objective.ttft, objective.tpot)
        for panel, name, limit in zip(axes, names, limits, strict=True):
            panel.set_title(name)
            _draw_limit(panel, limit)
        for number, (server, results) in enumerate(servers.items()):
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": "."}
            axes[0].plot(*_by_rate(results, "attainment"), label=server, **style)
            for panel, kind in zip(axes[1:], ("ttft", "tpot"), strict=True):
                for percentile, line in (("p50", "-"), ("p99", "--")):
                    rates, seconds = _by_rate(results, kind, percentile)
                    seconds = [max(value, _MIN_SECONDS) for value in seconds]
                    panel.plot(rates, seconds, line, **style)
        axes[0].set_ylim(-0.05, 1.05)
        axes[0].yaxis.set_major_formatter("{x:.0%}")
        for panel in axes[1:]:
            logarithmic(panel, "y", " s")
        tried = sorted({run["rate"] for one in servers.values() for run in one["runs"]})
        for panel in axes:
            panel.set_xscale("log")
            panel.set_xticks(tried, [f"{rate:g}/s" for rate in tried])
            panel.minorticks_off()
        axes[-1].set_xlabel("rate of requests (dashed: 99th percentile, dotted: objective)")


def _draw_limit(panel: Any, limit: float, *, vertical: bool = False) -> None:
    if math.isfinite(limit):
        line = panel.axvline if vertical else panel.axhline
        line(limit, color=INK, linestyle=":")


def _by_rate(results: dict[str, Any], *names: str) -> tuple[list[float], list[float]]:
    """The rates that a server was tried at, and the median over rounds of one result; `names` is
    the path to it in each run."""
    values_by_rate: dict[float, list[float]] = {}
    for run in results["runs"]:
        value = run
        for name in names:
            value = value[name]
        if value is not None:
            values_by_rate.setdefault(run["rate"], []).append(value)
    rates = sorted(values_by_rate)
    return rates, [statistics.median(values_by_rate[rate]) for rate in rates]
