"""A diffusion decoder's canvas as it filled in: once with every token in the colour of its pass,
appearing in that order, and then pass by pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

#: Seconds that all passes together take to appear.
REPLAY_SECONDS = 6.0
#: What stands for a mask.
MASK = "·"


@dataclass
class Step:
    """A pass: the canvas after it (-1: a mask), and the places it filled, counted from the start of
    the answer. `again` are those of them that had been filled before."""

    canvas: list[int]
    filled: list[int]
    again: list[int]


def steps_of(trace: list[dict[str, Any]]) -> list[Step]:
    """The passes of a trace that tell of a canvas."""
    steps: list[Step] = []
    for record in trace:
        if "canvas" not in record:
            continue
        before = steps[-1].canvas if steps else []
        start = record["start"]
        filled = [position - start for position in record["filled"]]
        again = [
            position for position in filled if position < len(before) and before[position] >= 0
        ]
        steps.append(Step(list(record["canvas"]), filled, again))
    return steps


def view(trace: list[dict[str, Any]], tokens: list[int], show: Callable[[int], str]) -> str:
    """The canvas of an answer of `tokens` as HTML; empty where the trace tells of none."""
    steps = steps_of(trace)
    if not steps:
        return ""
    when: dict[int, int] = {}
    for number, step in enumerate(steps, 1):
        when |= dict.fromkeys(step.filled, number)
    pause = min(0.3, REPLAY_SECONDS / len(steps))
    cells = "".join(
        _cell(token, when.get(position, 0), show) for position, token in enumerate(tokens)
    )
    masks = max(sum(token < 0 for token in step.canvas) for step in steps)
    rows = "".join(_row(number, step, show) for number, step in enumerate(steps, 1))
    return (
        "<h2>Canvas</h2>"
        '<p class="legend"><span><span class="key ramp">&nbsp;first&nbsp;&nbsp;&nbsp;last&nbsp;'
        f"</span> pass that filled a place, of {len(steps)}</span></p>"
        '<input class="replay" id="adt-replay" type="checkbox">'
        '<label for="adt-replay"> replay</label>'
        f'<div class="text canvas" style="--passes:{len(steps)};--pause:{pause:.3f}s">{cells}</div>'
        f'<h2>Passes</h2><p class="legend"><span><span class="chip new">token</span> filled in this'
        ' pass</span><span><span class="chip new again">token</span> filled anew</span>'
        f'<span><span class="mask">{MASK}</span> mask; there were {masks} at most</span></p>'
        f'<ol class="passes">{rows}</ol>'
    )


def _cell(token: int, number: int, show: Callable[[int], str]) -> str:
    text = escape(show(token)) or "∅"
    return f'<span class="cell" style="--n:{number}" title="pass {number}">{text}</span>'


def _row(number: int, step: Step, show: Callable[[int], str]) -> str:
    new, again = set(step.filled), set(step.again)
    parts: list[str] = []
    position = 0
    while position < len(step.canvas):
        token = step.canvas[position]
        if token < 0:
            stop = position
            while stop < len(step.canvas) and step.canvas[stop] < 0:
                stop += 1
            parts.append(f'<span class="mask">{MASK * (stop - position)}</span>')
            position = stop
            continue
        text = escape(show(token).replace("\n", "↵")) or "∅"
        if position in new:
            kind = "chip new again" if position in again else "chip new"
            parts.append(f'<span class="{kind}">{text}</span>')
        else:
            parts.append(f'<span class="old">{text}</span>')
        position += 1
    count = f"{len(step.filled)} filled"
    return (
        f'<li id="p{number}"><span class="n">{number}</span>'
        f'<div class="steps">{"".join(parts)}</div><span class="ms">{count}</span></li>'
    )
