"""Whether a canvas of tokens and masks can become a text of a grammar: emptiness of the
intersection of a context-free language with the finite automaton of the canvas.

The automaton is exact: a token is its bytes, a mask the bytes of any one token, and what stands
behind the end of the text is empty. It has no cycles, so it is walked once from the left, in the
order of the canvas, with Earley's items ("Jay Earley: An Efficient Context-Free Parsing Algorithm",
1970); where several ways through a mask meet, so do their items, and the places at which an item's
rule began are the bits of one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.constraints.byte_grammar import ByteGrammar
from anydecode.constraints.vocabulary import Vocabulary

#: In a canvas: a mask.
HOLE = -1
#: Nodes of the tree of spellings that masks may take. A larger vocabulary is cut: then a canvas may
#: be rejected that only rare tokens could complete, but none is accepted without a completion.
MOST_NODES = 1024
#: The same where no rule is recursive, so that what a mask leads to is computed once.
MOST_NODES_REGULAR = 16_384

#: From a state to the nodes at which its rule began, as bits.
Items = dict[int, int]


@dataclass
class _Node:
    """Of the tree of spellings: `group` of the tokens that end here, or -1."""

    group: int = -1
    ahead: dict[int, _Node] = field(default_factory=dict)


class Spellings:
    """A vocabulary as a grammar sees it. Tokens whose bytes belong to the same classes are one
    group: what holds of one holds of all. `groups[token]`, int32 `[width]`: -1 for tokens that
    never stand in a text (`never`, no bytes, or bytes no text has)."""

    def __init__(
        self, grammar: ByteGrammar, vocabulary: Vocabulary, never: frozenset[int] = frozenset()
    ) -> None:
        self.groups = np.full(vocabulary.size, -1, np.int32)
        known: dict[bytes, int] = {}
        for token, piece in enumerate(vocabulary.pieces):
            told = piece.translate(grammar.classes)
            if piece and grammar.dead not in told and token not in never:
                self.groups[token] = known.setdefault(told, len(known))
        self.count = len(known)
        self.tree = _Node()
        room = MOST_NODES_REGULAR if grammar.is_regular else MOST_NODES
        for told in sorted(known, key=lambda told: (len(told), told)):
            if room <= 0:
                break
            node = self.tree
            for one in told:
                if one not in node.ahead:
                    node.ahead[one] = _Node()
                    room -= 1
                node = node.ahead[one]
            node.group = known[told]


class Chart:
    """Closed Earley items at the nodes of the canvas's automaton, in the order of its edges."""

    def __init__(self, grammar: ByteGrammar) -> None:
        self.grammar = grammar
        self._nodes: list[tuple[Items, dict[int, list[tuple[int, int]]]]] = []

    def start(self) -> Items:
        """The items before the first byte."""
        return self.close({self.grammar.starts[0]: 1})

    def step(self, items: Items, one: int) -> Items:
        """Behind a byte of class `one`; not closed."""
        ahead: Items = {}
        steps = self.grammar.steps
        for state, origins in items.items():
            to = steps[state].get(one)
            if to is not None:
                ahead[to] = ahead.get(to, 0) | origins
        return ahead

    def close(self, kernel: Items) -> Items:
        """Predict and complete at a new node."""
        grammar = self.grammar
        if grammar.is_regular or not kernel:
            return kernel
        items: Items = {}
        waiting: dict[int, list[tuple[int, int]]] = {}
        here = 0  # this node's bit, where rules begin
        completed: dict[int, int] = {}
        queue = [*kernel.items()]
        while queue:
            state, origins = queue.pop()
            held = items.get(state, 0)
            fresh = origins & ~held
            if not fresh:
                continue
            items[state] = held | fresh
            for rule, behind in grammar.calls[state]:
                if not here:
                    here = 1 << len(self._nodes)
                    self._nodes.append((items, waiting))
                if not held:
                    waiting.setdefault(rule, []).append((state, behind))
                    queue.append((grammar.starts[rule], here))
                if rule in grammar.nullable:
                    queue.append((behind, fresh))
            rule = grammar.ends[state]
            if rule > 0:
                done = completed.get(rule, 0)
                left = fresh & ~done & ~here
                completed[rule] = done | left
                while left:
                    lowest = left & -left
                    left ^= lowest
                    before, callers = self._nodes[lowest.bit_length() - 1]
                    for caller, behind in callers.get(rule, ()):
                        queue.append((behind, before[caller]))
        return items

    def is_whole(self, items: Items) -> bool:
        """Whether the text may end here."""
        return any(self.grammar.ends[state] == 0 for state in items)

    def fork(self) -> Chart:
        """The same nodes, to be gone on with separately."""
        branch = Chart(self.grammar)
        branch._nodes = [*self._nodes]
        return branch


class CanvasGrammar:
    """Answers for canvases: sequences of tokens and `HOLE`. `ends` are the tokens that end a text;
    all that stands behind one must be such tokens, or holes. `mask` is the token of holes."""

    def __init__(
        self, grammar: ByteGrammar, vocabulary: Vocabulary, ends: frozenset[int], mask: int = -1
    ) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.ends = ends
        self.spellings = Spellings(grammar, vocabulary, ends | {mask})
        self._holes: dict[int, frozenset[int]] = {}

    def is_completable(self, canvas: Seq[int], begun: bytes = b"") -> bool:
        """Whether tokens in place of the holes make `begun` and the canvas a text."""
        return CanvasAnswer(self, canvas, begun).is_completable

    def spell(self, chart: Chart, items: Items, piece: bytes) -> Items:
        """Behind the bytes of a token, from closed items to items that are not."""
        told = piece.translate(self.grammar.classes)
        for position, one in enumerate(told):
            items = chart.step(items, one)
            if position + 1 < len(told):
                items = chart.close(items)
        return items

    def token(self, chart: Chart, items: Items, token: int) -> Items:
        """The same for a token of the canvas, closed."""
        piece = self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""
        return chart.close(self.spell(chart, items, piece)) if piece else items

    def hole(self, chart: Chart, items: Items) -> Items:
        """Behind any one token, closed."""
        ahead: Items = {}
        if self.grammar.is_regular:
            for state in items:
                if state not in self._holes:
                    self._holes[state] = frozenset(
                        to for _, one in self.each(chart, {state: 1}) for to in one
                    )
                ahead.update(dict.fromkeys(self._holes[state], 1))
            return ahead
        for _, found in self.each(chart, items):
            for state, origins in found.items():
                ahead[state] = ahead.get(state, 0) | origins
        return chart.close(ahead)

    def each(self, chart: Chart, items: Items) -> Iterator[tuple[int, Items]]:
        """Groups of tokens that may come next, and the items behind them, not closed."""
        waiting = [(self.spellings.tree, items)]
        while waiting:
            node, held = waiting.pop()
            for one, ahead in node.ahead.items():
                found = chart.step(held, one)
                if found:
                    if ahead.group >= 0:
                        yield ahead.group, found
                    if ahead.ahead:
                        waiting.append((ahead, chart.close(found)))


class CanvasAnswer:
    """One canvas: whether it is completable, and with which tokens at its holes it still is."""

    def __init__(self, rules: CanvasGrammar, canvas: Seq[int], begun: bytes = b"") -> None:
        self.rules = rules
        self.canvas = list(canvas)
        self.chart = Chart(rules.grammar)
        items = self.chart.start()
        if begun:
            items = self.chart.close(rules.spell(self.chart, items, begun))
        self._items = [items]
        #: The first place from which on nothing but ends of text need stand.
        self._tail = len(self.canvas)
        while self._tail and (
            canvas[self._tail - 1] == HOLE or canvas[self._tail - 1] in rules.ends
        ):
            self._tail -= 1
        #: Where the text ends at the latest.
        self._last = next(
            (position for position, token in enumerate(canvas) if token in rules.ends),
            len(self.canvas),
        )
        self._charts = [self.chart.fork()]

    @property
    def is_completable(self) -> bool:
        """Whether some tokens make the canvas a text."""
        if self._last < self._tail:  # text behind an end of text
            return False
        return self._goes_on(self.chart.fork(), self._items[0], 0)

    def before(self, position: int) -> tuple[Chart, Items]:
        """A chart up to `position`, to be gone on with, and the closed items there."""
        while len(self._items) <= position:
            chart = self._charts[-1].fork()
            at = len(self._items) - 1
            self._items.append(self._behind(chart, self._items[at], at))
            self._charts.append(chart)
        return self._charts[position].fork(), self._items[position]

    def accepts(self, position: int, token: int) -> bool:
        """Whether the canvas is completable with `token` in the hole at `position`."""
        rules = self.rules
        if token in rules.ends:
            return self._may_end(position)
        chart, items = self.before(position)
        if self._last < position or token >= len(rules.spellings.groups):
            return False
        if rules.spellings.groups[token] < 0:
            return False
        return self._goes_on(chart, rules.token(chart, items, token), position + 1)

    def allowed(self, position: int) -> np.ndarray:
        """Boolean `[width]`: the tokens, of those that masks stand for, with which the hole at
        `position` leaves the canvas completable."""
        rules = self.rules
        groups = rules.spellings.groups
        fine = np.zeros(rules.spellings.count + 1, bool)  # the last: of no group
        if position < self._last:
            chart, items = self.before(position)
            verdicts: dict[frozenset[tuple[int, int]], bool] = {}
            for group, found in rules.each(chart, items):
                behind = frozenset(found.items())
                if behind not in verdicts:
                    branch = chart.fork()
                    verdicts[behind] = self._goes_on(branch, branch.close(found), position + 1)
                fine[group] = verdicts[behind]
        allowed: np.ndarray = fine[groups]
        allowed[[end for end in rules.ends if end < len(allowed)]] = self._may_end(position)
        return allowed

    def _may_end(self, position: int) -> bool:
        """Whether the text may have ended when it comes to `position`."""
        return any(
            self.chart.is_whole(self.before(end)[1])
            for end in range(self._tail, min(position, self._last) + 1)
        )

    def _goes_on(self, chart: Chart, items: Items, position: int) -> bool:
        while items:
            if position >= self._tail and (position == len(self.canvas) or self.rules.ends):
                if chart.is_whole(items):
                    return True
            if position >= self._last or position == len(self.canvas):
                return False
            items = self._behind(chart, items, position)
            position += 1
        return False

    def _behind(self, chart: Chart, items: Items, position: int) -> Items:
        token = self.canvas[position]
        if token == HOLE:
            return self.rules.hole(chart, items)
        return self.rules.token(chart, items, token)
