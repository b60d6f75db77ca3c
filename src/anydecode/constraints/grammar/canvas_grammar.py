"""Decides whether a canvas of tokens and masks can be completed to a text of a grammar.

This is emptiness of the intersection of a context-free language with the finite automaton of the
canvas.

The automaton is exact: a token is its bytes, a mask the bytes of any one token, and tokens after
the end of the text are empty. It has no cycles, so it is parsed once from left to right with Earley
items ("Jay Earley: An Efficient Context-Free Parsing Algorithm", 1970). Where several paths through
a mask meet, their items are merged; the origins of an item (the nodes at which its rule started)
are the bits of one integer.

All tokens of the vocabulary are walked together, as the trie of their bytes: where they lead to the
same items, they are one array of nodes, whose items are computed once. A few short tokens are tried
first: if those complete a canvas, the others need not be walked.

A grammar without recursion is one deterministic automaton. Its states are handled all together, as
arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property

import numpy as np

from anydecode.constraints.grammar.byte_grammar import ByteGrammar
from anydecode.constraints.vocabulary import Vocabulary

#: In a canvas: a mask.
MASK_POSITION = -1
#: Maximum number of nodes of the trie of the tokens that are tried first.
_FEW_NODES = 128
#: Nodes whose children are listed one by one: of more, arrays are faster.
_SINGLE_NODES = 8
#: Maximum number of pairs of states of which the targets of a mask are found at a time.
_MAX_PAIRS = 1 << 24

#: Bytes per token of a table of token groups, and per node of a trie.
_BYTES_PER_TOKEN, _BYTES_PER_NODE = 16, 20

#: Earley items: from a state to the nodes at which its rule started, as bits.
Items = dict[int, int]


class TokenTrie:
    """The trie of the byte classes of tokens; node 0 is the root.

    The edges are sorted by their first nodes: those of node n are `first[n]` to `first[n + 1]`.

    Args:
        spellings: Byte classes, each of a group of tokens: spelling i is that of group i.

    Attributes:
        group: int32 `[nodes]`: the group that ends at each node, or -1.
        first: int64 `[nodes + 1]`: see above.
        labels: uint8 `[edges]`: the byte class of each edge.
        targets: int32 `[edges]`: the node that each edge leads to.
    """

    def __init__(self, spellings: Seq[bytes]) -> None:
        group, sources, every = [-1], list[int](), bytearray()
        path, last = [0], b""
        for spelling, number in sorted(zip(spellings, range(len(spellings)), strict=True)):
            shared = 0
            for one, other in zip(last, spelling, strict=False):
                if one != other:
                    break
                shared += 1
            del path[shared + 1 :]
            new = range(len(group), len(group) + len(spelling) - shared)
            sources += [path[-1], *new[:-1]]
            every += spelling[shared:]
            path += new
            group += [-1] * (len(new) - 1) + [number]
            last = spelling
        self.group = np.array(group, np.int32)
        parents, labels = np.array(sources, np.int64), np.frombuffer(bytes(every), np.uint8)
        order = np.lexsort((labels, parents))
        self.labels, self.targets = labels[order], (order + 1).astype(np.int32)
        self.first = np.searchsorted(parents[order], np.arange(len(group) + 1))

    @property
    def num_bytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return _BYTES_PER_NODE * len(self.group)

    def children(self, node: int) -> Iterator[tuple[int, int]]:
        """The edges of a node: byte classes and nodes."""
        edges = slice(self.first[node], self.first[node + 1])
        return zip(self.labels[edges].tolist(), self.targets[edges].tolist(), strict=True)

    def grouped_children(self, nodes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The children of all of `nodes`, some of which have children, by their byte class."""
        if len(nodes) <= _SINGLE_NODES:
            listed: dict[int, list[int]] = {}
            for node in nodes.tolist():
                for label, child in self.children(node):
                    listed.setdefault(label, []).append(child)
            for label, children in listed.items():
                yield label, np.array(children, np.int32)
            return
        counts = self.first[nodes + 1] - self.first[nodes]
        ends = np.cumsum(counts)
        edges = np.arange(ends[-1]) + np.repeat(self.first[nodes] - ends + counts, counts)
        labels = self.labels[edges]
        targets = self.targets[edges[np.argsort(labels, kind="stable")]]
        stop = 0
        for label, count in enumerate(np.bincount(labels).tolist()):
            if count:
                start, stop = stop, stop + count
                yield label, targets[start:stop]


class TokenGroups:
    """The tokens of a vocabulary, grouped: tokens whose bytes belong to the same byte classes are
    equivalent for the grammar.

    `groups` is int32 `[vocab_size]`: the group of each token, -1 for tokens that occur in no text
    (those in `excluded`, without bytes, or with bytes that occur in no text).
    """

    def __init__(
        self, grammar: ByteGrammar, vocabulary: Vocabulary, excluded: frozenset[int] = frozenset()
    ) -> None:
        self.groups = np.full(vocabulary.size, -1, np.int32)
        group_of: dict[bytes, int] = {}
        for token, data in enumerate(vocabulary.token_bytes):
            byte_classes = data.translate(grammar.classes)
            if data and grammar.dead_class not in byte_classes and token not in excluded:
                self.groups[token] = group_of.setdefault(byte_classes, len(group_of))
        self.count = len(group_of)
        self.trie = TokenTrie([*group_of])
        few: list[bytes] = []
        num_left = _FEW_NODES
        for spelling in sorted(group_of, key=lambda spelling: (len(spelling), spelling)):
            num_left -= len(spelling)
            if num_left < 0:
                break
            few.append(spelling)
        #: A trie of the shortest of them.
        self.few = TokenTrie(few)


class Chart:
    """Closed Earley items at the nodes of the canvas's automaton, in the order of its edges."""

    def __init__(self, grammar: ByteGrammar) -> None:
        self.grammar = grammar
        self._nodes: list[tuple[Items, dict[int, list[tuple[int, int]]]]] = []

    def start(self) -> Items:
        """The closed items before the first byte."""
        return self.close({self.grammar.start_states[0]: 1})

    def step(self, items: Items, byte_class: int) -> Items:
        """The items after a byte of class `byte_class`, not closed."""
        result: Items = {}
        steps = self.grammar.transitions
        for state, origins in items.items():
            target = steps[state].get(byte_class)
            if target is not None:
                result[target] = result.get(target, 0) | origins
        return result

    def close(self, kernel: Items) -> Items:
        """Returns the closure of `kernel` by prediction and completion at a new node."""
        grammar = self.grammar
        if not kernel:
            return kernel
        items: Items = {}
        callers_by_rule: dict[int, list[tuple[int, int]]] = {}
        node_bit = 0  # the bit of this node as an origin; 0 until a rule starts here
        completed: dict[int, int] = {}
        queue = [*kernel.items()]
        while queue:
            state, origins = queue.pop()
            known_origins = items.get(state, 0)
            new_origins = origins & ~known_origins
            if not new_origins:
                continue
            items[state] = known_origins | new_origins
            for rule, next_state in grammar.rule_calls[state]:
                if not node_bit:
                    node_bit = 1 << len(self._nodes)
                    self._nodes.append((items, callers_by_rule))
                if not known_origins:
                    callers_by_rule.setdefault(rule, []).append((state, next_state))
                    queue.append((grammar.start_states[rule], node_bit))
                if rule in grammar.nullable:
                    queue.append((next_state, new_origins))
            rule = grammar.completed_rule[state]
            if rule > 0:
                completed_origins = completed.get(rule, 0)
                remaining = new_origins & ~completed_origins & ~node_bit
                completed[rule] = completed_origins | remaining
                while remaining:
                    lowest_bit = remaining & -remaining
                    remaining ^= lowest_bit
                    origin_items, callers = self._nodes[lowest_bit.bit_length() - 1]
                    for caller, next_state in callers.get(rule, ()):
                        queue.append((next_state, origin_items[caller]))
        return items

    def is_whole(self, items: Items) -> bool:
        """Whether the text may end with these items."""
        return any(self.grammar.completed_rule[state] == 0 for state in items)

    def fork(self) -> Chart:
        """Returns a copy that can be extended separately."""
        branch = Chart(self.grammar)
        branch._nodes = [*self._nodes]
        return branch


def merged(several: Iterable[Items]) -> Items:
    """The items of all of `several`."""
    result: Items = {}
    for items in several:
        for state, origins in items.items():
            result[state] = result.get(state, 0) | origins
    return result


class CanvasGrammar:
    """A grammar for canvases, which are sequences of token ids and `MASK_POSITION`.

    Args:
        grammar: The automata of the grammar.
        vocabulary: The token bytes.
        ends: End-of-text tokens. After one, only such tokens and masks are allowed.
        mask: The id of the mask token, which occurs in no text; -1 if there is none.
    """

    def __init__(
        self, grammar: ByteGrammar, vocabulary: Vocabulary, ends: frozenset[int], mask: int = -1
    ) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.ends = ends
        self.token_groups = TokenGroups(grammar, vocabulary, ends | {mask})

    @cached_property
    def states(self) -> RegularStates:
        """The automaton of a grammar without recursion."""
        return RegularStates(self.grammar, self.token_groups)

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the token groups and of the arrays of states, in bytes."""
        pairs = self.states.mask_steps if self.grammar.is_regular else ()
        arrays = sum(pair.nbytes for pair in pairs) + self.token_groups.trie.num_bytes
        return _BYTES_PER_TOKEN * self.vocabulary.size + arrays

    def answer(self, canvas: Seq[int], prefix: bytes = b"") -> CanvasAnswer:
        """One canvas, after `prefix`."""
        kind = RegularAnswer if self.grammar.is_regular else CanvasAnswer
        return kind(self, canvas, prefix)

    def is_completable(self, canvas: Seq[int], prefix: bytes = b"") -> bool:
        """Whether `prefix` and the canvas can be completed to a text by replacing the masks."""
        return self.answer(canvas, prefix).is_completable

    def advance_bytes(self, chart: Chart, items: Items, data: bytes) -> Items:
        """The items after the bytes of a token, not closed. `items` are closed."""
        byte_classes = data.translate(self.grammar.classes)
        for index, byte_class in enumerate(byte_classes):
            items = chart.step(items, byte_class)
            if index + 1 < len(byte_classes):
                items = chart.close(items)
        return items

    def token(self, chart: Chart, items: Items, token: int) -> Items:
        """The closed items after a token of the canvas."""
        data = (
            self.vocabulary.token_bytes[token] if token < len(self.vocabulary.token_bytes) else b""
        )
        return chart.close(self.advance_bytes(chart, items, data)) if data else items

    def advance_mask(self, chart: Chart, items: Items, trie: TokenTrie) -> Items:
        """The closed items after a mask: any one token of `trie`."""
        return chart.close(merged(after for _, after in self.advance_groups(chart, items, trie)))

    def advance_groups(
        self, chart: Chart, items: Items, trie: TokenTrie
    ) -> Iterator[tuple[np.ndarray, Items]]:
        """Yields the groups of tokens of `trie` that are allowed next, int32 `[groups]`, with the
        items after them, not closed. Items may occur again, with other groups."""
        level = [(items, np.zeros(1, np.int64))] if len(trie.targets) else []
        while level:
            reached: dict[frozenset[tuple[int, int]], tuple[Items, list[np.ndarray]]] = {}
            for node_items, nodes in level:
                for byte_class, children in trie.grouped_children(nodes):
                    after = chart.step(node_items, byte_class)
                    if after:
                        key = frozenset(after.items())
                        reached.setdefault(key, (after, []))[1].append(children)
            level = []
            for after, parts in reached.values():
                nodes = np.concatenate(parts)
                groups = trie.group[nodes]
                groups = groups[groups >= 0]
                if len(groups):
                    yield groups, after
                inner = nodes[trie.first[nodes + 1] > trie.first[nodes]]
                if len(inner):
                    level.append((chart.close(after), inner))


class CanvasAnswer:
    """One canvas: whether it is completable, and with which tokens at its masks it remains so.

    Args:
        rules: The grammar.
        canvas: Token ids and `MASK_POSITION`.
        prefix: Text before the canvas.
    """

    def __init__(self, rules: CanvasGrammar, canvas: Seq[int], prefix: bytes = b"") -> None:
        self.rules = rules
        self.canvas = list(canvas)
        #: The first position from which on all tokens can be end-of-text tokens.
        self._first_free = len(self.canvas)
        while self._first_free and (
            canvas[self._first_free - 1] == MASK_POSITION
            or canvas[self._first_free - 1] in rules.ends
        ):
            self._first_free -= 1
        #: The position of the first end-of-text token, where the text ends at the latest.
        self._text_end = next(
            (position for position, token in enumerate(canvas) if token in rules.ends),
            len(self.canvas),
        )
        self._begin(prefix)

    def _begin(self, prefix: bytes) -> None:
        self.chart = Chart(self.rules.grammar)
        items = self.chart.start()
        if prefix:
            items = self.chart.close(self.rules.advance_bytes(self.chart, items, prefix))
        #: By the trie of tokens at masks: the chart and the closed items before each position.
        self._steps = {trie: [(self.chart.fork(), items)] for trie in self._tries}

    @property
    def is_completable(self) -> bool:
        """Whether the canvas has a completion that is a text of the grammar."""
        if self._text_end < self._first_free:  # text after an end-of-text token
            return False
        return self._completes()

    @property
    def _tries(self) -> tuple[TokenTrie, TokenTrie]:
        """The tries of tokens at masks: what completes with few of them needs no others."""
        return self.rules.token_groups.few, self.rules.token_groups.trie

    def _completes(self) -> bool:
        return self._can_complete(*self.items_at(0, self.rules.token_groups.trie), 0)

    def items_at(self, position: int, trie: TokenTrie) -> tuple[Chart, Items]:
        """Returns a copy of the chart up to `position`, and the closed items there, with tokens of
        `trie` at the masks before it."""
        steps = self._steps[trie]
        while len(steps) <= position:
            chart, items = steps[-1]
            chart = chart.fork()
            steps.append((chart, self._advance(chart, items, len(steps) - 1, trie)))
        chart, items = steps[position]
        return chart.fork(), items

    def accepts(self, position: int, token: int) -> bool:
        """Whether the canvas is completable with `token` in place of the mask at `position`."""
        rules = self.rules
        if token in rules.ends:
            return self._may_end(position)
        if self._text_end < position or token >= len(rules.token_groups.groups):
            return False
        if rules.token_groups.groups[token] < 0:
            return False
        return self._completes_with(position, token)

    def _completes_with(self, position: int, token: int) -> bool:
        for trie in self._tries:
            chart, items = self.items_at(position, trie)
            if self._can_complete(chart, self.rules.token(chart, items, token), position + 1, trie):
                return True
        return False

    def allowed(self, position: int) -> np.ndarray:
        """Boolean `[vocab_size]`: the tokens with which the mask at `position` can be replaced so
        that the canvas remains completable."""
        rules = self.rules
        groups = rules.token_groups.groups
        is_allowed_group = np.zeros(rules.token_groups.count + 1, bool)  # the last: of no group
        if position < self._text_end:
            for some in self._allowed_groups(position):
                is_allowed_group[some] = True
        allowed: np.ndarray = is_allowed_group[groups]
        allowed[[end for end in rules.ends if end < len(allowed)]] = self._may_end(position)
        return allowed

    def _allowed_groups(self, position: int) -> Iterator[np.ndarray]:
        """The token groups with which the mask at `position` can be replaced, as arrays."""
        chart, items = self.items_at(position, self.rules.token_groups.trie)
        groups: dict[frozenset[tuple[int, int]], list[np.ndarray]] = {}
        for some, after in self.rules.advance_groups(chart, items, self.rules.token_groups.trie):
            groups.setdefault(frozenset(after.items()), []).append(some)
        for after in self._completing_items(chart, [dict(key) for key in groups], position + 1):
            yield from groups[frozenset(after.items())]

    def _completing_items(
        self, chart: Chart, candidates: list[Items], position: int
    ) -> Iterator[Items]:
        """Those of `candidates`, items before `position` that are not closed, with which the canvas
        is completable. Several are tried together: most often, few or none are wrong."""
        doubtful = []
        for items in candidates:
            branch = chart.fork()
            few = self.rules.token_groups.few
            if self._reaches_end(branch, branch.close(items), position, few):
                yield items
            else:
                doubtful.append(items)
        groups = [doubtful]
        while groups:
            group = groups.pop()
            branch, union = chart.fork(), merged(group)
            if not self._reaches_end(
                branch, branch.close(union), position, self.rules.token_groups.trie
            ):
                continue
            if len(group) == 1:
                yield group[0]
            else:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]

    def _may_end(self, position: int) -> bool:
        """Whether the text may end at or before `position`."""
        ends = range(self._first_free, min(position, self._text_end) + 1)
        return any(self._is_whole_at(end) for end in ends)

    def _is_whole_at(self, position: int) -> bool:
        """Whether the text before `position` can be whole."""
        return any(self.chart.is_whole(self.items_at(position, trie)[1]) for trie in self._tries)

    def _can_complete(
        self, chart: Chart, items: Items, position: int, trie: TokenTrie | None = None
    ) -> bool:
        """Whether the canvas from `position` on is completable, with tokens of `trie` at masks
        (default: all)."""
        few, every = self._tries
        return self._reaches_end(chart.fork(), items, position, few) or (
            trie is not few and self._reaches_end(chart, items, position, every)
        )

    def _reaches_end(self, chart: Chart, items: Items, position: int, trie: TokenTrie) -> bool:
        """Whether the canvas from `position` on is completable with tokens of `trie` at masks."""
        while items:
            if position >= self._first_free and (position == len(self.canvas) or self.rules.ends):
                if chart.is_whole(items):
                    return True
            if position >= self._text_end or position == len(self.canvas):
                return False
            items = self._advance(chart, items, position, trie)
            position += 1
        return False

    def _advance(self, chart: Chart, items: Items, position: int, trie: TokenTrie) -> Items:
        token = self.canvas[position]
        if token == MASK_POSITION:
            return self.rules.advance_mask(chart, items, trie)
        return self.rules.token(chart, items, token)


class RegularStates:
    """The states of a grammar without recursion, as arrays.

    `transitions` is int32 `[num_states + 1, num_classes]`: the target of each state and byte class.
    The last state has no way out; it is the target where there is none. `is_final` says at which
    states the text may end.
    """

    def __init__(self, grammar: ByteGrammar, token_groups: TokenGroups) -> None:
        self.grammar = grammar
        self.dead = len(grammar.transitions)
        self.transitions = np.full((self.dead + 1, max(grammar.classes) + 1), self.dead, np.int32)
        for state, targets in enumerate(grammar.transitions):
            self.transitions[state, list(targets)] = list(targets.values())
        self.is_final = np.array([*(rule == 0 for rule in grammar.completed_rule), False])
        self._trie = token_groups.trie

    @cached_property
    def mask_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of a state and a state after some token, as two arrays."""
        sources, targets = [], []
        size = max(1, _MAX_PAIRS // (self.dead + 1))
        for first in range(0, self.dead, size):
            states = np.arange(first, min(first + size, self.dead))
            is_reached = np.zeros((len(states), self.dead + 1), bool)
            for _, rows, reached in self.after_groups(states):
                is_reached[rows, reached] = True
            found = np.nonzero(is_reached)
            sources.append(found[0] + first)
            targets.append(found[1])
        return np.concatenate(sources), np.concatenate(targets)

    def after_groups(self, states: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields each token group that some of `states` allow: which of them, and the states after
        it."""
        stack = [(0, np.arange(len(states)), states)]
        while stack:
            node, rows, current = stack.pop()
            for byte_class, child in self._trie.children(node):
                after = self.transitions[current, byte_class]
                is_alive = after != self.dead
                if not is_alive.any():
                    continue
                alive, after = rows[is_alive], after[is_alive]
                if self._trie.group[child] >= 0:
                    yield int(self._trie.group[child]), alive, after
                stack.append((child, alive, after))

    def after_bytes(self, states: np.ndarray, data: bytes) -> np.ndarray:
        """The state after these bytes, from each of `states`."""
        for byte_class in data.translate(self.grammar.classes):
            states = self.transitions[states, byte_class]
        return states


class RegularAnswer(CanvasAnswer):
    """One canvas of a grammar without recursion.

    Sets of states are boolean `[num_states + 1]`: those before each position that the canvas before
    it can lead to, and those from which the canvas behind it leads to a whole text.
    """

    def _begin(self, prefix: bytes) -> None:
        states = self.rules.states
        start = states.after_bytes(np.array([states.grammar.start_states[0]]), prefix)
        self._reached = [self._set(start)]
        self._completing: dict[int, np.ndarray] = {}

    def _set(self, members: np.ndarray) -> np.ndarray:
        result = np.zeros(self.rules.states.dead + 1, bool)
        result[members] = True
        result[-1] = False
        return result

    def _token_bytes(self, position: int) -> bytes:
        """The bytes of the token at a position that holds no mask."""
        token, known = self.canvas[position], self.rules.vocabulary.token_bytes
        return known[token] if token < len(known) else b""

    def reached(self, position: int) -> np.ndarray:
        """The states before `position`."""
        states = self.rules.states
        while len(self._reached) <= position:
            before, at = self._reached[-1], len(self._reached) - 1
            if self.canvas[at] == MASK_POSITION:
                sources, targets = states.mask_steps
                after = targets[before[sources]]
            else:
                after = states.after_bytes(np.flatnonzero(before), self._token_bytes(at))
            self._reached.append(self._set(after))
        return self._reached[position]

    def completing(self, position: int) -> np.ndarray:
        """The states from which the canvas from `position` on can be completed."""
        states, length = self.rules.states, len(self.canvas)
        for at in range(length, position - 1, -1):
            if at in self._completing:
                continue
            may_end = at >= self._first_free and (at == length or bool(self.rules.ends))
            found = states.is_final.copy() if may_end else np.zeros(states.dead + 1, bool)
            if at < min(self._text_end, length):
                behind = self._completing[at + 1]
                if self.canvas[at] == MASK_POSITION:
                    sources, targets = states.mask_steps
                    found[sources[behind[targets]]] = True
                else:
                    every = np.arange(states.dead + 1)
                    found |= behind[states.after_bytes(every, self._token_bytes(at))]
            self._completing[at] = found
        return self._completing[position]

    def _completes(self) -> bool:
        return bool((self.reached(0) & self.completing(0)).any())

    def _completes_with(self, position: int, token: int) -> bool:
        data = self.rules.vocabulary.token_bytes[token]
        after = self.rules.states.after_bytes(np.flatnonzero(self.reached(position)), data)
        return bool(self.completing(position + 1)[after].any())

    def _allowed_groups(self, position: int) -> Iterator[np.ndarray]:
        completing = self.completing(position + 1)
        states = np.flatnonzero(self.reached(position))
        for group, _, after in self.rules.states.after_groups(states):
            if completing[after].any():
                yield np.array([group])

    def _is_whole_at(self, position: int) -> bool:
        return bool((self.reached(position) & self.rules.states.is_final).any())
