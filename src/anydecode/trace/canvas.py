"""HTML view of a diffusion decoder's canvas: once with every token in the colour of its pass,
animated in that order, and then pass by pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

#: Duration of the animation over all passes, in seconds.
REPLAY_SECONDS = 6.0
#: The text shown for a mask.
MASK = "·"


@dataclass
class Step:
    """One pass: the canvas after it (-1 for a mask), and the positions it filled, counted from the
    start of the answer. `refilled` are those of them that were filled before."""

    canvas: list[int]
    filled: list[int]
    refilled: list[int]


def steps_of(trace: list[dict[str, Any]]) -> list[Step]:
    """The passes of a trace that recorded a canvas."""
    steps: list[Step] = []
    for record in trace:
        if "canvas" not in record:
            continue
        previous = steps[-1].canvas if steps else []
        start = record["start"]
        filled = [position - start for position in record["filled"]]
        refilled = [
            position for position in filled if position < len(previous) and previous[position] >= 0
        ]
        steps.append(Step(list(record["canvas"]), filled, refilled))
    return steps


def view(trace: list[dict[str, Any]], tokens: list[int], show: Callable[[int], str]) -> str:
    """The canvas of an answer of `tokens` as HTML; empty if the trace has no canvas."""
    steps = steps_of(trace)
    if not steps:
        return ""
    pass_of: dict[int, int] = {}
    for number, step in enumerate(steps, 1):
        pass_of |= dict.fromkeys(step.filled, number)
    pause = min(0.3, REPLAY_SECONDS / len(steps))
    cells = "".join(
        _cell(token, pass_of.get(position, 0), show) for position, token in enumerate(tokens)
    )
    max_masks = max(sum(token < 0 for token in step.canvas) for step in steps)
    rows = "".join(_row(number, step, show) for number, step in enumerate(steps, 1))
    return (
        "<h2>Canvas</h2>"
        '<p class="legend"><span><span class="key ramp">&nbsp;first&nbsp;&nbsp;&nbsp;last&nbsp;'
        f"</span> pass that filled a position, of {len(steps)}</span></p>"
        '<input class="replay" id="adt-replay" type="checkbox">'
        '<label for="adt-replay"> replay</label>'
        f'<div class="text canvas" style="--passes:{len(steps)};--pause:{pause:.3f}s">{cells}</div>'
        f'<h2>Passes</h2><p class="legend"><span><span class="chip new">token</span> filled in this'
        ' pass</span><span><span class="chip new again">token</span> filled again</span>'
        f'<span><span class="mask">{MASK}</span> mask; at most {max_masks} at once</span></p>'
        f'<ol class="passes">{rows}</ol>'
    )


def _cell(token: int, number: int, show: Callable[[int], str]) -> str:
    text = escape(show(token)) or "∅"
    return f'<span class="cell" style="--n:{number}" title="pass {number}">{text}</span>'


def _row(number: int, step: Step, show: Callable[[int], str]) -> str:
    filled, refilled = set(step.filled), set(step.refilled)
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
        if position in filled:
            css_class = "chip new again" if position in refilled else "chip new"
            parts.append(f'<span class="{css_class}">{text}</span>')
        else:
            parts.append(f'<span class="old">{text}</span>')
        position += 1
    count = f"{len(step.filled)} filled"
    return (
        f'<li id="p{number}"><span class="n">{number}</span>'
        f'<div class="steps">{"".join(parts)}</div><span class="ms">{count}</span></li>'
    )
