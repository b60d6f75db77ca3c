"""The longest match of terminals, compiled into the rules of a grammar over bytes.

A grammar in Lark's notation is read in two stages: a lexer divides the text into terminals, and the
rules allow sequences of them. The lexer takes the longest match: a terminal ends before a byte only
if no terminal that is allowed there, ignored text included, can go on with that byte. With
`NAME: /[a-z]+/`, "ifx" is one NAME where both NAME and "if" are allowed, and "if" before a space
may be either. What ignored text matches as well is ignored. This is the lexer of llguidance, which
computes the masks of autoregressive decoders. Like it, this one does not go back to a shorter match
where a longer one fails.

What is allowed depends on the text so far, by a stack of unbounded height. Here, as in the
contextual lexer of an LALR parser, it depends on the place in the rules: the end of a recursive
rule is followed by what follows any of its uses. Where that is more than what is allowed, texts are
lost that llguidance allows; none are gained, but for ignored text before and after the others.

A boundary between two terminals is a state of a rule and a set of bytes that may not come next:
those that would have made the terminal before it longer. Rules are copied by these sets before and
after them. The result is an ordinary grammar over bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property

from anydecode.constraints.grammar.automata import (
    MAX_STATES,
    TOO_LARGE,
    byte_classes,
    class_masks,
    determinize,
    leaves,
)
from anydecode.constraints.grammar.byte_regex import EMPTY, Expression, choice, sequence
from anydecode.errors import ConstraintError

#: The number of the ignored text among the terminals, and that of the rule of the whole text.
_IGNORED, _ROOT = -1, 0
#: A flag in a set of barred bytes: a terminal must come next, as ignored text has been read for it.
_TERMINAL_ONLY = 1 << 256
#: Maximum number of pairs of states to which one text may lead, of boundaries, and of pairs of
#: states of two terminals that are compared.
_MAX_PAIRS, _MAX_BOUNDARIES, _MAX_COMPARED = 100_000, 20_000, 20_000

#: A state of a rule, and the bytes that may not come next, as a bit mask with the flag.
Boundary = tuple[int, int]
#: A rule, and the bytes that may not come first in it.
_Key = tuple[int, int]


class _Lexer:
    """The automaton of a terminal and of others that may be longer. What `ignored` matches too is
    no match of the terminal.

    Attributes:
        steps: `steps[state]` maps classes of bytes to states that lead to a match of the terminal;
            state 0 is the start.
        longer: By the states at which the terminal matches: the bytes with which some terminal goes
            on, as a bit mask.
    """

    def __init__(
        self,
        terminal: Expression,
        others: Iterable[Expression],
        ignored: Expression | None,
        members: dict[int, list[int]],
        masks: list[int],
    ) -> None:
        marked = [sequence([terminal, ("ref", -1)])]
        if ignored is not None:
            marked.append(sequence([ignored, ("ref", -2)]))
        found, _ = determinize(
            choice([*marked, *others]),
            lambda leaf: [leaf[1]] if leaf[0] == "ref" else members[leaf[1]],
        )
        matches = [state for state, targets in enumerate(found) if {-1, -2} & {*targets} == {-1}]
        sources: list[list[int]] = [[] for _ in found]
        for state, targets in enumerate(found):
            for target in targets.values():
                sources[target].append(state)
        useful = {*matches}
        stack = [*matches]
        while stack:
            for source in sources[stack.pop()]:
                if source not in useful:
                    useful.add(source)
                    stack.append(source)
        self.steps = [
            {label: to for label, to in targets.items() if label >= 0 and to in useful}
            for targets in found
        ]
        self.longer = {
            state: sum(masks[label] for label in found[state] if label >= 0) for state in matches
        }


class _Terminals:
    """The terminals of a grammar, by number."""

    def __init__(self, terminals: dict[int, Expression]) -> None:
        self._terminals = terminals
        sets = [leaf[1] for one in terminals.values() for leaf in leaves(one)]
        class_of_byte, self._members = byte_classes(sets)
        self.masks = class_masks(class_of_byte)
        self._lexers: dict[tuple[int, frozenset[int], bool], _Lexer] = {}
        self._relations: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        words = {number: _word(one) for number, one in terminals.items()}
        self._words = {number: word for number, word in words.items() if word is not None}
        self._patterns = [number for number, word in words.items() if word is None]
        self._sorted = sorted((word, number) for number, word in self._words.items())

    def lexer(
        self, terminal: int, others: frozenset[int] = frozenset(), ignores: bool = False
    ) -> _Lexer:
        """The automaton of a terminal and of `others`; with `ignores`, what is ignored text too is
        no match of the terminal."""
        key = terminal, others - {terminal}, ignores
        if key not in self._lexers:
            rest = [self._terminals[one] for one in sorted(key[1])]
            ignored = self._terminals[_IGNORED] if ignores else None
            self._lexers[key] = _Lexer(
                self._terminals[terminal], rest, ignored, self._members, self.masks
            )
        return self._lexers[key]

    def first_bytes(self, terminal: int) -> int:
        """The bytes with which a terminal begins, as a bit mask."""
        return sum(self.masks[label] for label in self.lexer(terminal).steps[0])

    def longer(self, terminal: int) -> frozenset[int]:
        """The terminals that may go on where `terminal` matches."""
        return self._related(terminal)[0]

    def equal(self, terminal: int) -> frozenset[int]:
        """The terminals that match some text that `terminal` matches."""
        return self._related(terminal)[1]

    def _related(self, terminal: int) -> tuple[frozenset[int], frozenset[int]]:
        if terminal not in self._relations:
            longer: set[int] = set()
            equal = {terminal}
            others: Iterable[int] = self._terminals
            if terminal in self._words:  # of words, only those that begin with this one
                word = self._words[terminal]
                others = self._patterns
                first = bisect_left(self._sorted, word, key=lambda pair: pair[0])
                for other_word, number in self._sorted[first:]:
                    if not other_word.startswith(word):
                        break
                    (equal if other_word == word else longer).add(number)
            for other in others:
                is_longer, is_equal = self._compared(terminal, other)
                longer |= {other} if is_longer else set()
                equal |= {other} if is_equal else set()
            self._relations[terminal] = frozenset(longer), frozenset(equal)
        return self._relations[terminal]

    def _compared(self, terminal: int, other: int) -> tuple[bool, bool]:
        """Whether `other` may go on where `terminal` matches, and whether it matches there. Both
        are true in case of doubt."""
        first, second = self.lexer(terminal), self.lexer(other)
        is_longer = is_equal = False
        seen: set[tuple[int, int]] = set()
        stack = [(0, 0)]
        while stack:
            one, two = stack.pop()
            for label in first.steps[one].keys() & second.steps[two].keys():
                pair = first.steps[one][label], second.steps[two][label]
                if pair in seen:
                    continue
                seen.add(pair)
                stack.append(pair)
                if pair[0] in first.longer:
                    is_longer |= bool(second.steps[pair[1]])
                    is_equal |= pair[1] in second.longer
            if len(seen) > _MAX_COMPARED:
                return True, True
        return is_longer, is_equal


def _word(terminal: Expression) -> bytes | None:
    """The only text of a terminal, if it is a sequence of bytes."""
    kind, body = terminal
    parts = body if kind == "seq" else (terminal,)
    if any(part[0] != "set" or part[1].bit_count() != 1 for part in parts):
        return None
    return bytes(part[1].bit_length() - 1 for part in parts)


class _Places:
    """The states of the rules, as automata over terminals.

    Attributes:
        steps: `steps[state]` maps terminals to states.
        calls: `calls[state]` maps rules to the states after them.
        is_final: Whether a state is at the end of its rule.
        rule: The rule of each state.
        start: The first state of each rule.
        terminals: The terminals.
        ignores: Whether there is ignored text.
    """

    def __init__(self, rules: dict[str, Expression], ignored: Expression | None) -> None:
        number = {name: place for place, name in enumerate(rules)}
        terminals: dict[Expression, int] = {}

        def labels(leaf: Expression) -> list[int]:
            if leaf[0] == "ref":
                return [-1 - number[leaf[1]]]
            return [terminals.setdefault(leaf[1], len(terminals))]

        self.steps: list[dict[int, int]] = []
        self.calls: list[dict[int, int]] = []
        self.is_final: list[bool] = []
        self.rule: list[int] = []
        self.start: list[int] = []
        for rule in rules.values():
            first = len(self.steps)
            found, is_final = determinize(rule, labels, MAX_STATES - first)
            self.rule += [len(self.start)] * len(found)
            self.start.append(first)
            self.is_final += is_final
            for targets in found:
                moved = [(label, first + to) for label, to in targets.items()]
                self.steps.append({label: to for label, to in moved if label >= 0})
                self.calls.append({-1 - label: to for label, to in moved if label < 0})
        self.ignores = ignored is not None
        numbered = {at: one for one, at in terminals.items()}
        self.terminals = _Terminals(
            numbered if ignored is None else {_IGNORED: ignored, **numbered}
        )
        self._returns: dict[int, list[int]] = {}
        for calls in self.calls:
            for called, after in calls.items():
                self._returns.setdefault(called, []).append(after)
        self._around: dict[int, list[int]] = {}
        self._allowed: dict[int, dict[int, list[int]]] = {}
        self._next_bytes: dict[int, int] = {}

    @cached_property
    def _nullable(self) -> set[int]:
        """The rules that derive no terminals."""
        nullable: set[int] = set()
        while True:
            found = {
                rule
                for rule, start in enumerate(self.start)
                if any(self.is_final[state] for state in self._skipping([start], nullable))
            }
            if found == nullable:
                return nullable
            nullable = found

    def _skipping(self, states: Iterable[int], nullable: set[int]) -> list[int]:
        """`states`, and those that calls of `nullable` rules lead to from them."""
        found = dict.fromkeys(states)
        stack = [*found]
        while stack:
            for rule, after in self.calls[stack.pop()].items():
                if rule in nullable and after not in found:
                    found[after] = None
                    stack.append(after)
        return [*found]

    def _around_state(self, state: int) -> list[int]:
        """The states that a text may be at that has just led to `state`: also those after the rules
        that end there, and those at the starts of the rules that are called."""
        if state not in self._around:
            found = dict.fromkeys([state])
            stack = [state]
            while stack:
                for one in self._skipping([stack.pop()], self._nullable):
                    ended = self._returns.get(self.rule[one], []) if self.is_final[one] else []
                    new = [other for other in (one, *ended) if other not in found]
                    found.update(dict.fromkeys(new))
                    stack += new
            stack = [*found]
            while stack:
                starts = [self.start[rule] for rule in self.calls[stack.pop()]]
                skipped = self._skipping(starts, self._nullable)
                new = [other for other in skipped if other not in found]
                found.update(dict.fromkeys(new))
                stack += new
            self._around[state] = [*found]
        return self._around[state]

    def _allowed_at(self, state: int) -> dict[int, list[int]]:
        """The terminals that may come after a text that has just led to `state`, with the states
        after them."""
        if state not in self._allowed:
            allowed: dict[int, list[int]] = {_IGNORED: [state]} if self.ignores else {}
            for place in self._around_state(state):
                for terminal, after in self.steps[place].items():
                    allowed.setdefault(terminal, []).append(after)
            self._allowed[state] = allowed
        return self._allowed[state]

    @cached_property
    def rivals(self) -> list[set[int]]:
        """The terminals that may be allowed wherever each state is reached."""
        rivals: list[set[int]] = [set() for _ in self.steps]
        pairs = {(self.start[_ROOT], self.start[_ROOT])}
        stack = [*pairs]
        while stack:
            one, other = stack.pop()
            first, second = self._allowed_at(one), self._allowed_at(other)
            for state, terminals in ((one, second), (other, first)):
                for place in self._around_state(state):
                    rivals[place] |= terminals.keys()
            for terminal, afters in first.items():
                for equal in self.terminals.equal(terminal) & second.keys():
                    if _IGNORED in (terminal, equal) and terminal != equal:
                        continue  # such a text is ignored
                    new = {(min(a, b), max(a, b)) for a in afters for b in second[equal]} - pairs
                    pairs |= new
                    stack += new
            if len(pairs) > _MAX_PAIRS:
                raise ConstraintError(TOO_LARGE)
        return rivals

    def next_bytes(self, state: int) -> int:
        """The bytes that may come after a text that has just led to `state`, as a bit mask."""
        if state not in self._next_bytes:
            found = 0
            for terminal in self._allowed_at(state):
                found |= self.terminals.first_bytes(terminal)
            self._next_bytes[state] = found
        return self._next_bytes[state]


class _Boundaries:
    """The boundaries between the terminals of a text, and what leads from one to another."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        #: By boundary: the terminals from there on, with their lexers and the states after them.
        self._begun: dict[Boundary, list[tuple[_Lexer, int, int]]] = {}
        #: By boundary: those after the terminals from there on.
        self._next: dict[Boundary, list[Boundary]] = {}
        #: By the rules that are used: what is barred after them.
        self.after: dict[_Key, set[int]] = {}

    def at(self, state: int, barred: int) -> Boundary:
        """The boundary at `state`. Bytes that cannot come next there need not be barred."""
        return state, barred & (self._places.next_bytes(state) | _TERMINAL_ONLY)

    def begun(self, boundary: Boundary) -> list[tuple[_Lexer, int, int]]:
        """The terminals that may begin at a boundary: the lexer, the state after the terminal, and
        the flag there."""
        if boundary not in self._begun:
            state, _ = boundary
            places, found = self._places, []
            rivals = places.rivals[state]
            options = [(one, after, 0) for one, after in places.steps[state].items()]
            if places.ignores and (options or self._ends_text(state)):
                options.append((_IGNORED, state, _TERMINAL_ONLY))
            for terminal, after, flag in options:
                others = places.terminals.longer(terminal) & rivals
                if not places.next_bytes(after):  # nothing comes next, so nothing is barred
                    others = frozenset()
                ignores = terminal != _IGNORED and _IGNORED in places.terminals.equal(terminal)
                found.append((places.terminals.lexer(terminal, others, ignores), after, flag))
            self._begun[boundary] = found
            if len(self._begun) > _MAX_BOUNDARIES:
                raise ConstraintError(TOO_LARGE)
        return self._begun[boundary]

    def _ends_text(self, state: int) -> bool:
        return self._places.is_final[state] and self._places.rule[state] == _ROOT

    def ends_rule(self, boundary: Boundary) -> bool:
        """Whether the rule may end at a boundary."""
        state, barred = boundary
        may_end = self._ends_text(state) or not barred & _TERMINAL_ONLY
        return self._places.is_final[state] and may_end

    def called(self, boundary: Boundary) -> list[tuple[_Key, int]]:
        """The rules that may begin at a boundary, with what is barred before them, and the states
        after them."""
        state, barred = boundary
        if barred & _TERMINAL_ONLY:
            return []
        places = self._places
        return [
            ((rule, self.at(places.start[rule], barred)[1]), after)
            for rule, after in places.calls[state].items()
        ]

    def edges(self, boundary: Boundary, lexer: _Lexer) -> Iterator[tuple[int | None, int, int]]:
        """The edges of a terminal that begins at a boundary: the state of the lexer before (None:
        the boundary), the bytes as a bit mask, and the state after."""
        masks, barred = self._places.terminals.masks, boundary[1]
        seen: set[int] = set()
        stack: list[int | None] = [None]
        while stack:
            source = stack.pop()
            targets: dict[int, int] = {}
            for label, to in lexer.steps[source or 0].items():
                if source is not None or not masks[label] & barred:
                    targets[to] = targets.get(to, 0) | masks[label]
            for to, bytes_ in targets.items():
                yield source, bytes_, to
            new = targets.keys() - seen
            seen |= new
            stack += sorted(new)

    def next(self, boundary: Boundary) -> list[Boundary]:
        """The boundaries after each terminal, and after each rule as far as its ends are known."""
        if boundary not in self._next:
            self._next[boundary] = [
                self.at(after, flag | lexer.longer[state])
                for lexer, after, flag in self.begun(boundary)
                for state in sorted({to for _, _, to in self.edges(boundary, lexer)})
                if state in lexer.longer
            ]
        found = [*self._next[boundary]]
        for key, after in self.called(boundary):
            found += [self.at(after, barred) for barred in sorted(self.after.get(key, ()))]
        return found

    def within(self, key: _Key) -> list[Boundary]:
        """The boundaries within a rule."""
        found = dict.fromkeys([(self._places.start[key[0]], key[1])])
        stack = [*found]
        while stack:
            new = [one for one in dict.fromkeys(self.next(stack.pop())) if one not in found]
            found.update(dict.fromkeys(new))
            stack += new
        return [*found]

    def find_rules(self) -> None:
        """Finds the rules that are used, and what is barred after them."""
        self.after[_ROOT, 0] = set()
        size = 0
        while size < (size := sum(1 + len(after) for after in self.after.values())):
            for key, after in [*self.after.items()]:
                for boundary in self.within(key):
                    for called, _ in self.called(boundary):
                        self.after.setdefault(called, set())
                    if self.ends_rule(boundary):
                        after.add(boundary[1])

    def graph(self, key: _Key, barred: int | None) -> Expression:
        """The automaton over bytes of a rule with these bytes barred after it (None: any)."""
        nodes: dict[object, int] = {self.within(key)[0]: 0, None: 1}
        edges: dict[tuple[int, Expression, int], None] = {}

        def connect(source: object, part: Expression, target: object) -> None:
            numbers = [nodes.setdefault(one, len(nodes)) for one in (source, target)]
            edges[numbers[0], part, numbers[1]] = None

        for boundary in self.within(key):
            for lexer, after, flag in self.begun(boundary):
                for source, bytes_, to in self.edges(boundary, lexer):
                    node = boundary if source is None else (lexer, after, flag, source)
                    connect(node, ("set", bytes_), (lexer, after, flag, to))
                    if to in lexer.longer:
                        end = self.at(after, flag | lexer.longer[to])
                        connect((lexer, after, flag, to), EMPTY, end)
            for called, after in self.called(boundary):
                for behind in sorted(self.after[called]):
                    connect(boundary, ("ref", _name(called, behind)), self.at(after, behind))
            if self.ends_rule(boundary) and barred in (None, boundary[1]):
                connect(boundary, EMPTY, None)
        return "graph", tuple(edges)


def _name(key: _Key, barred: int) -> str:
    """The name of a rule with some bytes barred before and after it."""
    return f"{key[0]} {key[1]:x} {barred:x}"


def with_longest_match(
    rules: dict[str, Expression], ignored: Expression | None
) -> dict[str, Expression]:
    """The rules of a grammar over bytes, rule "" first, in which terminals are longest matches.

    Args:
        rules: Expressions over terminals that match no empty text, and other rules, by name. Rule
            "", the first one, is the whole text.
        ignored: Text that may come before every terminal and at the end.

    Raises:
        ConstraintError: The grammar is too large.
    """
    boundaries = _Boundaries(_Places(rules, ignored))
    boundaries.find_rules()
    found = {"": boundaries.graph((_ROOT, 0), None)}
    for key, after in boundaries.after.items():
        for barred in sorted(after):
            found[_name(key, barred)] = boundaries.graph(key, barred)
    return found
