"""The HTML view of a canvas: every token in the colour of its pass, and the canvas after each
pass."""

from __future__ import annotations

import re
from html import unescape

from anydecode.trace.canvas import MASK, steps_of, view
from anydecode.trace.html import page
from traces import Reader, make_generation

TRACE = [
    {"canvas": [-1, -1, 7, -1], "start": 5, "filled": [7]},
    {"canvas": [4, -1, 7, 1], "start": 5, "filled": [5, 8]},
    {"canvas": [4, 6, 8], "start": 5, "filled": [6, 7]},
]
SHOW = {4: " <a>", 6: " b", 7: "c", 8: "d\n", 1: "<eos>"}


def shown(html: str, kind: str) -> list[str]:
    return [unescape(text) for text in re.findall(rf'<span class="{kind}"[^>]*>([^<]*)', html)]


def test_a_canvas_fills_in_pass_by_pass() -> None:
    steps = steps_of([{"tokens": [1]}, *TRACE])
    assert [(step.filled, step.refilled) for step in steps] == [
        ([2], []),
        ([0, 3], []),
        ([1, 2], [2]),
    ]
    html = view(TRACE, [4, 6, 8], SHOW.__getitem__)
    assert re.findall(r'class="cell" style="--n:(\d)"', html) == ["2", "3", "3"]
    assert shown(html, "cell") == [" <a>", " b", "d\n"]
    rows = [unescape(re.sub("<[^>]*>", "|", row)) for row in html.split("<li ")[1:]]
    cut = [re.sub(r"\|+", "|", row.split(">", 1)[-1]) for row in rows]
    assert MASK * 2 + "|c|" + MASK in cut[0] and "1 filled" in cut[0]
    assert " <a>|" + MASK + "|c|<eos>" in cut[1] and "2 filled" in cut[1]
    assert " <a>| b|d↵" in cut[2]
    assert shown(html, "chip new again") == ["token", "d↵"]
    assert view([{"tokens": [1]}], [1], str) == ""


def test_a_page_with_a_canvas_is_well_formed() -> None:
    records = [{"position": 3, "drafted": [], "parents": [], "sources": None, "accepted": [],
                "tokens": [], **record} for record in TRACE]  # fmt: skip
    html = page(make_generation(records, [11, 12, 13]))
    reader = Reader(html)
    assert len(set(reader.ids)) == len(reader.ids) and "<h2>Canvas</h2>" in html
    assert "<b>" not in html
