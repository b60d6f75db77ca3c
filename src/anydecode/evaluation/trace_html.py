"""A generation as one self-contained page: its text with what was drafted, kept and rejected in
colour, the time of every pass, and every pass's tree; for a diffusion decoder, its canvas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from anydecode.evaluation import trace_canvas
from anydecode.evaluation.trace_style import STYLE

if TYPE_CHECKING:
    from anydecode.engine.generation import Generation

#: Sources with a colour of their own; further ones share the last.
COLOURS = 6
_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍", "": "∅"}


@dataclass
class Pass:
    """One pass of the target, or several in a row that nobody traced (`record` is None)."""

    number: int
    tokens: list[int]
    record: dict[str, Any] | None = None
    method: str = "draft"

    @property
    def num_kept(self) -> int:
        """How many of the tokens had been drafted."""
        return 0 if self.record is None else min(len(self.record["accepted"]), len(self.tokens))

    @property
    def draft_seconds(self) -> float:
        return 0.0 if self.record is None else self.record.get("draft_seconds") or 0.0

    @property
    def verify_seconds(self) -> float:
        return 0.0 if self.record is None else self.record.get("verify_seconds") or 0.0

    def source(self, node: int) -> str:
        """Who drafted `node`: the method, unless it names its sources."""
        sources = self.record["sources"] if self.record else None
        return sources[node] if sources else self.method


def page(generation: Generation) -> str:
    """The whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(generation.decoder)}: a trace</title>"
        f"<style>body{{margin:0}}</style></head><body>{fragment(generation)}</body></html>\n"
    )


def fragment(generation: Generation) -> str:
    """The view alone, for a notebook's cell."""
    view = _View(generation)
    canvas = trace_canvas.view(generation.trace or [], generation.tokens, view.show)
    if canvas:
        parts = [view.head(), canvas]
    else:
        parts = [view.head(), view.text()]
        if generation.trace:
            parts += [view.times(), view.passes()]
    return f'<div class="adt"><style>{STYLE}</style><main>{"".join(parts)}</main></div>'


def passes_of(generation: Generation) -> list[Pass]:
    """The answer's tokens by pass, in order."""
    passes: list[Pass] = []
    tokens, at = generation.tokens, 0
    records = generation.trace or []
    first = generation.stats.num_prompt_tokens
    for record in records:
        start = record["position"] - first
        if start > at:
            passes.append(Pass(len(passes) + 1, tokens[at:start]))
        stop = min(start + len(record["tokens"]), len(tokens))
        passes.append(Pass(len(passes) + 1, tokens[start:stop], record, generation.decoder))
        at = stop
    if at < len(tokens):
        passes.append(Pass(len(passes) + 1, tokens[at:]))
    return passes


class _View:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.show: Callable[[int], str] = generation.token_text or str
        self.all = passes_of(generation)
        names = [
            p.source(node)
            for p in self.all
            if p.record is not None
            for node in range(len(p.record["drafted"]))
        ]
        self.sources = list(dict.fromkeys(names))

    def head(self) -> str:
        stats, generation = self.generation.stats, self.generation
        figures = {
            "tokens": str(stats.num_tokens),
            "passes": str(stats.passes),
            "tokens per pass": f"{stats.tokens_per_pass:.2f}",
            "tokens per second": f"{stats.tokens_per_second:.1f}",
            "seconds": f"{stats.seconds:.2f}",
            "drafts kept": self._share(),
            "ended by": generation.finish_reason,
        }
        cells = "".join(
            f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
            for name, value in figures.items()
            if value
        )
        return f'<h1>{escape(generation.decoder)}</h1><dl class="figures">{cells}</dl>'

    def _share(self) -> str:
        drafted = sum(len(p.record["drafted"]) for p in self.all if p.record)
        kept = sum(p.num_kept for p in self.all)
        return f"{kept} of {drafted}" if drafted else ""

    def text(self) -> str:
        keys = "".join(
            f'<span><span class="key {self._colour(name)}">token</span> kept, drafted by'
            f" {escape(name)}</span>"
            for name in self.sources
        )
        keys += '<span><span class="key">token</span> said by the model</span>'
        box = ""
        if any(p.record and len(p.record["drafted"]) > p.num_kept for p in self.all):
            keys += '<span><span class="no">token</span> rejected</span>'
            box = (
                '<input class="hide" id="adt-no" type="checkbox" checked>'
                '<label for="adt-no"> show rejected drafts</label>'
            )
        words = "".join(self._words(p) for p in self.all)
        return f'<h2>Text</h2><p class="legend">{keys}</p>{box}<div class="text">{words}</div>'

    def _words(self, p: Pass) -> str:
        parts = []
        for position, token in enumerate(p.tokens):
            kind = "own"
            if p.record is not None and position < p.num_kept:
                kind = self._colour(p.source(p.record["accepted"][position]))
            link = f'href="#p{p.number}" title="{escape(self._hint(p))}"'
            parts.append(f'<a class="{kind}" {link}>{escape(self.show(token))}</a>')
            if position == p.num_kept - 1 or (position == 0 and not p.num_kept):
                rejected = "".join(self.show(t) for t in self._rejected(p))
                if rejected:
                    before = len(parts) - (0 if p.num_kept else 1)
                    parts.insert(before, f'<span class="no">{escape(_flat(rejected))}</span>')
        return "".join(parts)

    def _rejected(self, p: Pass) -> list[int]:
        """The first branch that was drafted behind the last kept node, and rejected."""
        if p.record is None:
            return []
        drafted, parents = p.record["drafted"], p.record["parents"]
        node = p.record["accepted"][-1] if p.record["accepted"] else -1
        tokens: list[int] = []
        while True:
            children = [i for i, parent in enumerate(parents) if parent == node]
            if not children:
                return tokens
            node = children[0]
            tokens.append(drafted[node])

    def _hint(self, p: Pass) -> str:
        if p.record is None:
            return f"pass {p.number}: nothing was recorded"
        drafted = len(p.record["drafted"])
        spent = 1e3 * (p.draft_seconds + p.verify_seconds)
        return f"pass {p.number}: {p.num_kept} of {drafted} drafts kept, {spent:.1f} ms"

    def times(self) -> str:
        timed = [p for p in self.all if p.record is not None]
        longest = max((p.draft_seconds + p.verify_seconds for p in timed), default=0.0)
        if longest <= 0:
            return ""
        usual = median(p.draft_seconds + p.verify_seconds for p in timed)
        top = min(longest, 4 * usual)  # the prompt's pass would flatten all others
        bars = []
        for p in timed:
            draft, verify = (100 * s / top for s in (p.draft_seconds, p.verify_seconds))
            verify = min(verify, 100 - min(draft, 100))
            bars.append(
                f'<a href="#p{p.number}" title="{escape(self._hint(p))}">'
                f'<i class="d" style="height:{draft:.1f}%"></i>'
                f'<i style="height:{verify:.1f}%"></i></a>'
            )
        return (
            "<h2>Time per pass</h2>"
            f'<p class="legend"><span>full height: {1e3 * top:.1f} ms</span>'
            '<span><span class="key" style="background:var(--verify)">&nbsp;</span> scoring</span>'
            '<span><span class="key" style="background:var(--draft)">&nbsp;</span> drafting</span>'
            f'</p><div class="bars">{"".join(bars)}</div>'
        )

    def passes(self) -> str:
        items = ""
        for drafted, together in groupby(
            self.all, lambda p: bool(p.record and p.record["drafted"])
        ):
            run = list(together)
            items += "".join(self._item(p) for p in run) if drafted else self._plain(run)
        return f'<h2>Passes</h2><ol class="passes">{items}</ol>'

    def _item(self, p: Pass) -> str:
        chips = "".join(self._chip(token, "own") for token in p.tokens[p.num_kept :])
        spent = f"{1e3 * (p.draft_seconds + p.verify_seconds):.1f} ms"
        if p.draft_seconds:
            spent += f"<br>{1e3 * p.draft_seconds:.2f} drafting"
        return (
            f'<li id="p{p.number}"><span class="n">{p.number}<br>{_tokens(len(p.tokens))}</span>'
            f'<div class="tree">{self._tree(p, -1)}{chips}</div>'
            f'<span class="ms">{spent}</span></li>'
        )

    def _plain(self, run: list[Pass]) -> str:
        """Passes without drafts, as one entry that every one of them can be found at."""
        first, last = run[0].number, run[-1].number
        numbers = str(first) if first == last else f"{first} to {last}"
        chips = "".join(
            f'<span id="p{p.number}">{"".join(self._chip(t, "own") for t in p.tokens)}</span>'
            for p in run
        )
        spent = sum(p.draft_seconds + p.verify_seconds for p in run)
        shown = f"{1e3 * spent:.1f} ms" if spent else ""
        count = sum(len(p.tokens) for p in run)
        return (
            f'<li><span class="n">{numbers}<br>{_tokens(count)}</span>'
            f'<div class="tree">{chips}</div><span class="ms">{shown}</span></li>'
        )

    def _tree(self, p: Pass, node: int) -> str:
        """What hangs on `node`: one child goes on in the line, several get lines of their own."""
        assert p.record is not None
        parts = []
        while True:
            children = [i for i, parent in enumerate(p.record["parents"]) if parent == node]
            if len(children) != 1:
                break
            node = children[0]
            parts.append(self._node(p, node))
        if children:
            lines = "".join(f"<li>{self._node(p, c)}{self._tree(p, c)}</li>" for c in children)
            parts.append(f"<ol>{lines}</ol>")
        return "".join(parts)

    def _node(self, p: Pass, node: int) -> str:
        assert p.record is not None
        name = p.source(node)
        kept = node in p.record["accepted"][: p.num_kept]
        return self._chip(p.record["drafted"][node], self._colour(name) if kept else "off", name)

    def _chip(self, token: int, kind: str, title: str = "") -> str:
        hint = f' title="{escape(title)}"' if title else ""
        return f'<span class="chip {kind}"{hint}>{escape(_flat(self.show(token)))}</span>'

    def _colour(self, name: str) -> str:
        return f"s{min(self.sources.index(name), COLOURS - 1)}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _flat(text: str) -> str:
    """Text on one line, its white space visible."""
    if not text:
        return _SHOWN[""]
    return "".join(_visible(text))


def _visible(text: str) -> Iterator[str]:
    for character in text:
        yield _SHOWN.get(character, character)
