"""Training curves as SVG: loss and accuracy of a training run, or training and held-out loss of an
adapter run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from anydecode.plots import COLOURS

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.axis{stroke:#999}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:1.6}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#777}.grid{stroke:#333}}"
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 640, 170, 52, 40, 44


def to_svg(log: dict[str, Any]) -> str:
    """The SVG of a training run: loss above, accuracy on held-out questions below. `log` is the
    content of `log.json`."""
    history: list[dict[str, Any]] = log["history"]
    minutes: float = max([entry["seconds"] / 60 for entry in history] + [1e-9])
    stages = list(dict.fromkeys(entry["stage"] for entry in history))
    losses = [entry for entry in history if "loss" in entry]
    checks = [entry for entry in history if "accuracy" in entry]
    values = [math.log10(max(entry["loss"], 1e-4)) for entry in losses] or [0.0]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    high = max(high, low + 0.5)
    second = _TOP + _HEIGHT + _GAP

    def x(entry: dict[str, Any]) -> float:
        return _LEFT + _WIDTH * float(entry["seconds"]) / 60 / minutes

    def loss_y(entry: dict[str, Any]) -> float:
        fraction = (math.log10(max(entry["loss"], 1e-4)) - low) / (high - low)
        return _TOP + _HEIGHT * (1 - fraction)

    def accuracy_y(entry: dict[str, Any]) -> float:
        return second + _HEIGHT * (1 - float(entry["accuracy"]["all"]))

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20}'
        f' {second + _HEIGHT + 60}" role="img" aria-label="Training"><style>{_STYLE}</style>',
        f'<text x="{_LEFT}" y="16">loss per token (logarithmic)</text>',
        f'<text x="{_LEFT}" y="{second - 10}">accuracy on held-out questions, mean of tasks</text>',
    ]
    ticks = [low + 0.5 * step for step in range(round((high - low) * 2) + 1)]
    elements += _grid(_TOP, [(f"{10**tick:.2g}", (tick - low) / (high - low)) for tick in ticks])
    elements += _grid(
        second, [(f"{fraction:g}", fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)]
    )
    elements += _minute_axis(minutes, second + _HEIGHT)
    for position, stage in enumerate(stages):
        for entries, y in ((losses, loss_y), (checks, accuracy_y)):
            elements.append(
                _line([e for e in entries if e["stage"] == stage], x, y, COLOURS[position])
            )
    elements += _legend(stages, second + _HEIGHT + 50)
    return "\n".join([*elements, "</svg>\n"])


def held_out_svg(log: dict[str, Any]) -> str:
    """The SVG of an adapter run: training loss, and held-out loss by kind of text. `log` is the
    content of `log.json`."""
    history: list[dict[str, Any]] = log["history"]
    series = {
        "training": [(entry["seconds"], entry["loss"]) for entry in history if "loss" in entry]
    }
    for entry in history:
        for name, loss in entry.get("held_out", {}).items():
            series.setdefault(f"held-out {name}", []).append((entry["seconds"], loss))
    highest = math.ceil(max(loss for points in series.values() for _, loss in points))
    minutes = max(entry["seconds"] / 60 for entry in history) or 1e-9
    bottom = _TOP + _HEIGHT
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {bottom + 60}"'
        f' role="img" aria-label="Training of an adapter"><style>{_STYLE}</style>',
        f'<text x="{_LEFT}" y="16">nats per masked token</text>',
        *_grid(
            _TOP,
            [(f"{highest * fraction:g}", fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)],
        ),
        *_minute_axis(minutes, bottom),
    ]
    for colour, points in zip(COLOURS, series.values(), strict=False):
        coordinates = " ".join(
            f"{_LEFT + _WIDTH * seconds / 60 / minutes:.1f},{bottom - _HEIGHT * loss / highest:.1f}"
            for seconds, loss in points
        )
        elements.append(f'<polyline class="line" stroke="{colour}" points="{coordinates}"/>')
    return "\n".join([*elements, *_legend([*series], bottom + 50), "</svg>\n"])


def _minute_axis(minutes: float, bottom: float) -> list[str]:
    elements = [
        f'<text x="{_LEFT + _WIDTH * minute / minutes:.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"{minute}</text>"
        for minute in range(0, int(minutes) + 1, max(1, round(minutes / 8)))
    ]
    middle = _LEFT + _WIDTH / 2
    return [*elements, f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">minutes</text>']


def _legend(names: Sequence[str], bottom: float) -> list[str]:
    elements = []
    for position, name in enumerate(names):
        at = _LEFT + 200 * position
        elements.append(
            f'<rect x="{at}" y="{bottom - 9}" width="10" height="10" fill="{COLOURS[position]}"/>'
            f'<text x="{at + 14}" y="{bottom}">{escape(name)}</text>'
        )
    return elements


def _grid(top: float, ticks: Sequence[tuple[str, float]]) -> list[str]:
    elements = []
    for label, fraction in ticks:
        y, kind = top + _HEIGHT * (1 - fraction), "grid" if fraction else "axis"
        elements.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return elements


def _line(
    entries: Sequence[dict[str, Any]],
    x: Callable[[dict[str, Any]], float],
    y: Callable[[dict[str, Any]], float],
    colour: str,
) -> str:
    points = " ".join(f"{x(entry):.1f},{y(entry):.1f}" for entry in entries)
    return f'<polyline class="line" stroke="{colour}" points="{points}"/>'
