"""A generation as one self-contained HTML page: its text with accepted and rejected draft tokens in
colour, the time of every pass, and every pass's draft tree; for a diffusion decoder, its canvas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import Any, Protocol

from anydecode.trace import canvas as trace_canvas
from anydecode.trace.style import STYLE

#: Number of sources with their own colour; further ones share the last.
COLOURS = 6
_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍", "": "∅"}


class Traced(Protocol):
    """What this view reads of a generation (`anydecode.api.generation.Generation`)."""

    @property
    def decoder(self) -> str: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def stats(self) -> Any: ...

    @property
    def token_text(self) -> Callable[[int], str] | None: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def trace(self) -> list[dict[str, Any]] | None: ...


@dataclass
class Pass:
    """One pass of the target model, or several consecutive ones without a trace (`record` is
    None)."""

    number: int
    tokens: list[int]
    record: dict[str, Any] | None = None
    method: str = "draft"

    @property
    def num_accepted(self) -> int:
        """How many of the tokens are accepted draft tokens."""
        return 0 if self.record is None else min(len(self.record["accepted"]), len(self.tokens))

    @property
    def draft_seconds(self) -> float:
        """Time spent on drafting, in seconds; 0 if it was not recorded."""
        return 0.0 if self.record is None else self.record.get("draft_seconds") or 0.0

    @property
    def verify_seconds(self) -> float:
        """Time spent on the forward pass, in seconds; 0 if it was not recorded."""
        return 0.0 if self.record is None else self.record.get("verify_seconds") or 0.0

    def source(self, node: int) -> str:
        """The drafter of `node`: its recorded source, else the method."""
        sources = self.record["sources"] if self.record else None
        return sources[node] if sources else self.method


def page(generation: Traced) -> str:
    """The whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(generation.decoder)}: a trace</title>"
        f"<style>body{{margin:0}}</style></head><body>{fragment(generation)}</body></html>\n"
    )


def fragment(generation: Traced) -> str:
    """The view without the document around it, for a notebook cell."""
    view = _View(generation)
    canvas = trace_canvas.view(generation.trace or [], generation.tokens, view.show)
    if canvas:
        parts = [view.head(), canvas]
    else:
        parts = [view.head(), view.text()]
        if generation.trace:
            parts += [view.times(), view.passes()]
    return f'<div class="adt"><style>{STYLE}</style><main>{"".join(parts)}</main></div>'


def passes_of(generation: Traced) -> list[Pass]:
    """The answer's tokens grouped by pass, in order."""
    passes: list[Pass] = []
    tokens, position = generation.tokens, 0
    records = generation.trace or []
    first = generation.stats.num_prompt_tokens
    for record in records:
        start = record["position"] - first
        if start > position:
            passes.append(Pass(len(passes) + 1, tokens[position:start]))
        stop = min(start + len(record["tokens"]), len(tokens))
        passes.append(Pass(len(passes) + 1, tokens[start:stop], record, generation.decoder))
        position = stop
    if position < len(tokens):
        passes.append(Pass(len(passes) + 1, tokens[position:]))
    return passes


class _View:
    """Renders one generation."""

    def __init__(self, generation: Traced) -> None:
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
        facts = {
            "tokens": str(stats.num_tokens),
            "passes": str(stats.passes),
            "tokens per pass": f"{stats.tokens_per_pass:.2f}",
            "tokens per second": f"{stats.tokens_per_second:.1f}",
            "seconds": f"{stats.seconds:.2f}",
            "drafts accepted": self._accepted_share(),
            "ended by": generation.finish_reason,
        }
        cells = "".join(
            f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
            for name, value in facts.items()
            if value
        )
        return f'<h1>{escape(generation.decoder)}</h1><dl class="stats">{cells}</dl>'

    def _accepted_share(self) -> str:
        drafted = sum(len(p.record["drafted"]) for p in self.all if p.record)
        accepted = sum(p.num_accepted for p in self.all)
        return f"{accepted} of {drafted}" if drafted else ""

    def text(self) -> str:
        keys = "".join(
            f'<span><span class="key {self._colour(name)}">token</span> accepted, drafted by'
            f" {escape(name)}</span>"
            for name in self.sources
        )
        keys += '<span><span class="key">token</span> generated by the model</span>'
        box = ""
        if any(p.record and len(p.record["drafted"]) > p.num_accepted for p in self.all):
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
            css_class = "own"
            if p.record is not None and position < p.num_accepted:
                css_class = self._colour(p.source(p.record["accepted"][position]))
            link = f'href="#p{p.number}" title="{escape(self._hint(p))}"'
            parts.append(f'<a class="{css_class}" {link}>{escape(self.show(token))}</a>')
            if position == p.num_accepted - 1 or (position == 0 and not p.num_accepted):
                rejected = "".join(self.show(t) for t in self._rejected(p))
                if rejected:
                    index = len(parts) - (0 if p.num_accepted else 1)
                    parts.insert(
                        index, f'<span class="no">{escape(_make_visible(rejected))}</span>'
                    )
        return "".join(parts)

    def _rejected(self, p: Pass) -> list[int]:
        """The first rejected branch after the last accepted node."""
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
        duration = 1e3 * (p.draft_seconds + p.verify_seconds)
        return f"pass {p.number}: {p.num_accepted} of {drafted} drafts accepted, {duration:.1f} ms"

    def times(self) -> str:
        recorded = [p for p in self.all if p.record is not None]
        longest = max((p.draft_seconds + p.verify_seconds for p in recorded), default=0.0)
        if longest <= 0:
            return ""
        typical = median(p.draft_seconds + p.verify_seconds for p in recorded)
        max_seconds = min(
            longest, 4 * typical
        )  # limits the prefill pass, which would flatten all others
        bars = []
        for p in recorded:
            draft, verify = (100 * s / max_seconds for s in (p.draft_seconds, p.verify_seconds))
            verify = min(verify, 100 - min(draft, 100))
            bars.append(
                f'<a href="#p{p.number}" title="{escape(self._hint(p))}">'
                f'<i class="d" style="height:{draft:.1f}%"></i>'
                f'<i style="height:{verify:.1f}%"></i></a>'
            )
        return (
            "<h2>Time per pass</h2>"
            f'<p class="legend"><span>full height: {1e3 * max_seconds:.1f} ms</span>'
            '<span><span class="key" style="background:var(--verify)">&nbsp;</span>'
            " forward pass</span>"
            '<span><span class="key" style="background:var(--draft)">&nbsp;</span> drafting</span>'
            f'</p><div class="bars">{"".join(bars)}</div>'
        )

    def passes(self) -> str:
        items = ""
        for drafted, group in groupby(self.all, lambda p: bool(p.record and p.record["drafted"])):
            run = list(group)
            items += "".join(self._item(p) for p in run) if drafted else self._plain(run)
        return f'<h2>Passes</h2><ol class="passes">{items}</ol>'

    def _item(self, p: Pass) -> str:
        chips = "".join(self._chip(token, "own") for token in p.tokens[p.num_accepted :])
        duration = f"{1e3 * (p.draft_seconds + p.verify_seconds):.1f} ms"
        if p.draft_seconds:
            duration += f"<br>{1e3 * p.draft_seconds:.2f} drafting"
        return (
            f'<li id="p{p.number}">'
            f'<span class="n">{p.number}<br>{_token_count(len(p.tokens))}</span>'
            f'<div class="tree">{self._tree(p, -1)}{chips}</div>'
            f'<span class="ms">{duration}</span></li>'
        )

    def _plain(self, run: list[Pass]) -> str:
        """Consecutive passes without drafts, as one entry with an anchor for each of them."""
        first, last = run[0].number, run[-1].number
        numbers = str(first) if first == last else f"{first} to {last}"
        chips = "".join(
            f'<span id="p{p.number}">{"".join(self._chip(t, "own") for t in p.tokens)}</span>'
            for p in run
        )
        duration = sum(p.draft_seconds + p.verify_seconds for p in run)
        duration_text = f"{1e3 * duration:.1f} ms" if duration else ""
        count = sum(len(p.tokens) for p in run)
        return (
            f'<li><span class="n">{numbers}<br>{_token_count(count)}</span>'
            f'<div class="tree">{chips}</div><span class="ms">{duration_text}</span></li>'
        )

    def _tree(self, p: Pass, node: int) -> str:
        """The subtree of `node`: a single child continues the line, several children get a line
        each."""
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
        accepted = node in p.record["accepted"][: p.num_accepted]
        return self._chip(
            p.record["drafted"][node], self._colour(name) if accepted else "off", name
        )

    def _chip(self, token: int, css_class: str, title: str = "") -> str:
        hint = f' title="{escape(title)}"' if title else ""
        return (
            f'<span class="chip {css_class}"{hint}>{escape(_make_visible(self.show(token)))}</span>'
        )

    def _colour(self, name: str) -> str:
        return f"s{min(self.sources.index(name), COLOURS - 1)}"


def _token_count(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _make_visible(text: str) -> str:
    """`text` on one line, with visible white space."""
    if not text:
        return _VISIBLE[""]
    return "".join(_visible(text))


def _visible(text: str) -> Iterator[str]:
    for character in text:
        yield _VISIBLE.get(character, character)
