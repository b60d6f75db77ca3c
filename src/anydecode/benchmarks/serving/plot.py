"""Plots cumulative distributions of latencies as SVG."""

from __future__ import annotations

import math
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 300, 52, 40
_COLOURS = ("#2f6fb4", "#c2571a", "#3b8f4a", "#8a4fa3", "#7a6a1c", "#1c7f86")


def distribution_svg(title: str, curves: dict[str, list[float]], marks: dict[str, float]) -> str:
    """An SVG of cumulative distributions over seconds (logarithmic), one line per curve. `marks`
    are vertical lines, such as an objective. Curves without values are omitted."""
    curves = {name: sorted(values) for name, values in curves.items() if values}
    values = [max(v, 1e-5) for curve in curves.values() for v in curve] + list(marks.values())
    low = math.floor(math.log10(min(values, default=0.001)))
    high = max(low + 1, math.ceil(math.log10(max(values, default=1.0))))
    plot_width, plot_height = _WIDTH - _LEFT - 16, _HEIGHT - _BOTTOM - 34

    def x(value: float) -> float:
        return _LEFT + plot_width * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    def y(share: float) -> float:
        return 34 + plot_height * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for share in (0.0, 0.5, 0.99):
        parts.append(_line(_LEFT, y(share), _LEFT + plot_width, y(share), "#ddd"))
        coordinates = f'x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {coordinates}>{share:.0%}</text>")
    for power in range(low, high + 1):
        tick_x = x(10.0**power)
        parts.append(_line(tick_x, 34, tick_x, 34 + plot_height, "#eee"))
        label = f"{10.0**power:g} s"
        parts.append(
            f'<text x="{tick_x:.1f}" y="{50 + plot_height}" text-anchor="middle">{label}</text>'
        )
    for curve, colour in zip(curves.values(), _COLOURS, strict=False):
        shares = [(i + 1) / min(len(curve), 400) for i in range(min(len(curve), 400))]
        levels = [curve[math.ceil(share * len(curve)) - 1] for share in shares]
        corners = zip(levels, shares, strict=True)
        points = " ".join(f"{x(value):.1f},{y(share):.1f}" for value, share in corners)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    for number, ((name, value), colour) in enumerate(zip(marks.items(), _COLOURS, strict=False)):
        parts.append(
            _line(x(value), 34, x(value), 34 + plot_height, colour, ' stroke-dasharray="4 3"')
        )
        parts.append(f'<text x="{x(value) + 3:.1f}" y="{44 + 12 * number}">{escape(name)}</text>')
    for number, (name, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        tick_x = _LEFT + 150 * number
        parts.append(
            f'<rect x="{tick_x}" y="{_HEIGHT - 14}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{tick_x + 14}" y="{_HEIGHT - 5}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"{more}/>'
