"""A context-free grammar over bytes: one deterministic automaton per rule, whose edges are classes
of bytes or other rules.

Read from the part of Lark's notation without templates and foreign imports. Terminals are spelled
out in the rules, so there is no lexer and no longest match; what `%ignore` names may stand before
every terminal and at the end. Rules that do not contain themselves are inlined: a grammar without
recursion is a single automaton.
"""

from __future__ import annotations

import json
import re
from collections import deque
from functools import lru_cache

from anydecode.constraints.byte_regex import (
    EMPTY,
    MAX_PARTS,
    Expression,
    characters,
    choice,
    literal,
    num_copies,
    read_regex,
    repeated,
    sequence,
    size,
)
from anydecode.errors import ConstraintError

#: Parts of an inlined rule, and states of all automata together.
MOST_PARTS, MOST_STATES = 20_000, 20_000
_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\f]+|(//|\#)[^\n]*)|(?P<line>\n)
    |(?P<string>"(\\.|[^"\\\n])*"i?)|(?P<regex>/(?![*?/])(\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[!?]?_*[A-Za-z][A-Za-z0-9_\-]*)|(?P<number>\d+)
    |(?P<sign>->|\.\.|[:|()\[\]?*+~.,{}%])""",
    re.VERBOSE,
)
_TOO_LARGE = "the grammar is too large: make its repetitions smaller or its rules fewer"
#: NFA states in all DFA states of a rule, which the time and the memory of the construction follow.
_MAX_SUBSETS = 4_000_000
_START = "start"
_DECIMAL, _EXPONENT = r"([0-9]+\.[0-9]*|\.[0-9]+)", "[eE][+-]?[0-9]+"
_FLOAT = f"([0-9]+{_EXPONENT}|{_DECIMAL}({_EXPONENT})?)"
#: Terminals of Lark's library, as regular expressions.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "NEWLINE": r"(\r?\n)+",
}


class Rules:
    """`rules[name]` as expressions, from grammar text."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Expression] = {}
        self.ignored: list[Expression] = []
        self._told: list[tuple[str, str]] = []
        self._at = 0
        self._num_parts = 0
        self._scan(text)
        while self._at < len(self._told):
            self._statement()
        if _START not in self.rules:
            raise ConstraintError("the grammar has no rule named start")
        self._check(self.rules.values())

    def _scan(self, text: str) -> None:
        at, depth = 0, 0
        while at < len(text):
            found = _TOKENS.match(text, at)
            if found is None:
                line = text[at:].partition("\n")[0][:40]
                raise ConstraintError(f"this part of the grammar is not supported: {line!r}")
            at, kind, told = found.end(), str(found.lastgroup), found.group()
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(told, 0) if kind == "sign" else 0
            if kind == "line" and depth <= 0:
                self._told.append((kind, told))
            elif kind == "sign" and told == "|":
                while self._told and self._told[-1][0] == "line":
                    self._told.pop()  # an alternative on a line of its own
                self._told.append((kind, told))
            elif kind not in ("space", "line"):
                self._told.append((kind, told))
        self._told.append(("line", "\n"))

    def _next(self, *signs: str) -> str | None:
        """The sign that comes next, taken, if it is one of these."""
        kind, told = self._told[self._at]
        if kind == "sign" and told in signs:
            self._at += 1
            return told
        return None

    def _take(self, kind: str) -> str:
        found, told = self._told[self._at]
        if found != kind:
            raise ConstraintError(f"the grammar has {told!r} where a {kind} is expected")
        self._at += 1
        return told

    def _statement(self) -> None:
        if self._told[self._at][0] == "line":
            self._at += 1
            return
        if self._next("%"):
            name = self._take("name")
            if name == "import":
                self._import()
            elif name == "ignore":
                self.ignored.append(self._alternatives())
            else:
                raise ConstraintError(f"%{name} in a grammar is not supported here")
        else:
            name = self._take("name").lstrip("!?")
            if self._next("."):
                self._take("number")  # a priority: which of two readings, not which texts
            if not self._next(":"):
                raise ConstraintError(f"the rule {name} of the grammar has no ':' behind its name")
            self._define(name, self._alternatives())
        self._take("line")

    def _define(self, name: str, rule: Expression) -> None:
        if name in self.rules:
            raise ConstraintError(f"the grammar has two rules named {name}")
        self.rules[name] = rule

    def _import(self) -> None:
        """Terminals of Lark's library `common`."""
        names: list[str] = []
        library = self._take("name")
        if self._next("."):
            names.append(self._take("name"))
        else:
            while self._next("(", ","):
                names.append(self._take("name"))
            if not self._next(")"):
                raise ConstraintError("an import of the grammar is not closed")
        unknown = next((name for name in names if library != "common" or name not in _COMMON), None)
        if unknown is not None:
            raise ConstraintError(f"the grammar's import {library}.{unknown} is not supported here")
        renamed = self._take("name") if self._next("->") else None
        for name in names:
            self._define(renamed or name, ("terminal", read_regex(_COMMON[name])))

    def _alternatives(self) -> Expression:
        parts = [self._row()]
        while self._next("|"):
            parts.append(self._row())
        return choice(parts)

    def _row(self) -> Expression:
        parts: list[Expression] = []
        while True:
            kind, told = self._told[self._at]
            if kind == "line" or told in ("|", ")", "]"):
                return sequence(parts)
            if self._next("->"):
                self._take("name")
                return sequence(parts)
            parts.append(self._counted())

    def _counted(self) -> Expression:
        part = self._atom()
        while sign := self._next("?", "*", "+", "~", "{"):
            if sign in "?*+":
                least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign]
            else:
                least = self._number()
                several = self._next("..", ",")
                open_ended = several == "," and self._told[self._at][0] != "number"
                most = None if open_ended else self._number() if several else least
                if sign == "{" and not self._next("}"):
                    raise ConstraintError("a repetition in the grammar is not closed")
            self._num_parts += size(part) * num_copies(least, most)
            if self._num_parts > MAX_PARTS:
                raise ConstraintError(_TOO_LARGE)
            part = repeated(part, least, most)
        return part

    def _number(self) -> int:
        told = self._take("number")
        if len(told) > 9:
            raise ConstraintError("a repetition in the grammar has a number of more than 9 digits")
        return int(told)

    def _atom(self) -> Expression:
        kind, told = self._told[self._at]
        self._at += 1
        if kind == "name":
            return ("ref", told.lstrip("!?"))
        if kind == "string":
            text, ignore_case = _string(told)
            if self._next(".."):
                last, _ = _string(self._take("string"))
                if len(text) != 1 or len(last) != 1 or last < text:
                    raise ConstraintError(f"the grammar's range {text!r}..{last!r} is none")
                return ("terminal", characters([(ord(text), ord(last))]))
            return ("terminal", literal(text, ignore_case))
        if kind == "regex":
            body, _, flags = told[1:].rpartition("/")
            return ("terminal", read_regex(body, flags))
        if kind == "sign" and told in "([":
            inner = self._alternatives()
            closing = ")" if told == "(" else "]"
            if not self._next(closing):
                raise ConstraintError(f"the grammar has a {told!r} that is not closed")
            return inner if told == "(" else choice([EMPTY, inner])
        raise ConstraintError(f"the grammar has an unexpected {told!r}")

    def _check(self, rules: object) -> None:
        for name, rule in [*self.rules.items(), *(("%ignore", one) for one in self.ignored)]:
            for used in sorted(_refs(rule)):
                if used not in self.rules:
                    raise ConstraintError(f"{name} of the grammar uses {used}, which has no rule")

    def spelled(self) -> dict[str, Expression]:
        """The rules with their terminals spelled out and what is ignored put in; the first is a
        rule above `start`."""
        ends: dict[str, Expression] = {}

        def terminal(name: str, above: tuple[str, ...]) -> Expression:
            if name in above:
                raise ConstraintError(f"the terminal {name} of the grammar contains itself")
            if not _is_terminal(name):
                raise ConstraintError(f"the terminal {above[-1]} of the grammar uses a rule")
            if name not in ends:
                ends[name] = bare(self.rules[name], (*above, name))
            return ends[name]

        def bare(part: Expression, above: tuple[str, ...]) -> Expression:
            if part[0] == "ref":
                return terminal(part[1], above)
            return part[1] if part[0] == "terminal" else _mapped(part, lambda one: bare(one, above))

        ignored: Expression = ("star", choice([bare(one, ("%ignore",)) for one in self.ignored]))

        def put(part: Expression) -> Expression:
            if part[0] == "ref" and not _is_terminal(part[1]):
                return part
            if part[0] in ("ref", "terminal"):
                found = bare(part, ())
                return sequence([ignored, found]) if self.ignored else found
            return _mapped(part, put)

        top = sequence([("ref", _START), ignored] if self.ignored else [("ref", _START)])
        rules = {name: put(rule) for name, rule in self.rules.items() if not _is_terminal(name)}
        return {"": top, **rules}


def _string(told: str) -> tuple[str, bool]:
    ignore_case = told.endswith("i")
    quoted = told[:-1] if ignore_case else told
    try:
        return json.loads(quoted), ignore_case
    except ValueError:
        raise ConstraintError(f"{quoted} in the grammar is no string") from None


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _mapped(part: Expression, change: object) -> Expression:
    kind, held = part
    if kind == "set" or kind == "ref":
        return part
    if kind == "star":
        return (kind, change(held))  # type: ignore[operator]
    return (kind, tuple(change(one) for one in held))  # type: ignore[operator]


def _refs(part: Expression) -> set[str]:
    kind, held = part
    if kind == "ref":
        return {held}
    if kind in ("set", "terminal"):
        return set()
    return _refs(held) if kind == "star" else {name for one in held for name in _refs(one)}


def _inlined(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules that are left when those without recursion stand where they are used."""
    if any(size(rule) > MAX_PARTS for rule in rules.values()):
        raise ConstraintError(_TOO_LARGE)
    uses = {name: _refs(rule) for name, rule in rules.items()}
    below: dict[str, set[str]] = {}
    for name in rules:
        seen: set[str] = set()
        waiting = [*uses[name]]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += uses[one]
        below[name] = seen
    done: dict[str, Expression] = {}
    sizes: dict[str, int] = {}

    def put(part: Expression) -> Expression:
        if part[0] == "ref":
            fits = part[1] not in below[part[1]] and sizes[part[1]] <= MOST_PARTS
            return done[part[1]] if fits else part
        return _mapped(part, put)

    for name in sorted(rules, key=lambda name: len(below[name])):  # what is used comes first
        if name not in below[name]:
            done[name] = put(rules[name])
            sizes[name] = size(done[name])
            if sizes[name] > MAX_PARTS:
                raise ConstraintError(_TOO_LARGE)
    for name in rules:
        if name in below[name]:
            done[name] = put(rules[name])
    return done


class ByteGrammar:
    """The automata. States are numbers of one count; rule 0 is the whole text.

    `classes` is a table for `bytes.translate`: bytes of one class lead to the same states
    everywhere, and those of class `dead` nowhere. `steps[state]` leads from classes to states,
    `calls[state]` are (rule, state behind it), `ends[state]` is the rule that is complete there, or
    -1; `starts[rule]`, and `nullable`: the rules that derive the empty text. Every state is on the
    way to the end of its rule. Rule "" of `rules` is the whole text. Raises `ConstraintError` where
    no text is in the grammar.
    """

    def __init__(self, rules: dict[str, Expression]) -> None:
        wanted, waiting = [""], [""]
        while waiting:
            for name in sorted(_refs(rules[waiting.pop()])):
                if name not in wanted:
                    wanted.append(name)
                    waiting.append(name)
        self._number = {name: number for number, name in enumerate(wanted)}
        self._classify([rules[name] for name in wanted])
        self.steps: list[dict[int, int]] = []
        self.calls: list[list[tuple[int, int]]] = []
        self.ends: list[int] = []
        self.starts = [self._automaton(rules[name], self._number[name]) for name in wanted]
        self._trim()
        self.is_regular = not any(self.calls)

    def _classify(self, rules: list[Expression]) -> None:
        sets: dict[int, int] = {}

        def collect(part: Expression) -> None:
            kind, held = part
            if kind == "set":
                sets.setdefault(held, len(sets))
            elif kind == "star":
                collect(held)
            elif kind != "ref":
                for one in held:
                    collect(one)

        for rule in rules:
            collect(rule)
        known: dict[tuple[bool, ...], int] = {}
        found = []
        for byte in range(256):
            signature = tuple(bool(mask >> byte & 1) for mask in sets)
            found.append(known.setdefault(signature, len(known)))
        self.classes = bytes(found)
        self.dead = known[(False,) * len(sets)]  # no UTF-8 has the byte 255
        self._members = {
            mask: sorted({found[byte] for byte in range(256) if mask >> byte & 1}) for mask in sets
        }

    def _automaton(self, rule: Expression, number: int) -> int:
        """Thompson's construction, then subsets; the start state comes back."""
        empty: list[list[int]] = []
        edges: list[dict[int, list[int]]] = []  # by class, or by -1 - rule

        def node() -> int:
            if len(edges) > 8 * MOST_STATES:
                raise ConstraintError(_TOO_LARGE)
            empty.append([])
            edges.append({})
            return len(edges) - 1

        def build(part: Expression, first: int) -> int:
            kind, held = part
            if kind in ("set", "ref"):
                last = node()
                labels = self._members[held] if kind == "set" else [-1 - self._number[held]]
                for label in labels:
                    edges[first].setdefault(label, []).append(last)
                return last
            if kind == "seq":
                for one in held:
                    first = build(one, first)
                return first
            if kind == "star":
                inner = node()
                empty[first].append(inner)
                empty[build(held, inner)].append(inner)
                last = node()
                empty[inner].append(last)
                return last
            last = node()
            if kind == "first":
                for one in held:
                    empty[first].append(last)
                    first = build(one, first)
                empty[first].append(last)
                return last
            for one in held:
                inner = node()
                empty[first].append(inner)
                empty[build(one, inner)].append(last)
            return last

        start = node()
        end = build(rule, start)

        def closed(nodes: set[int]) -> frozenset[int]:
            waiting = [*nodes]
            while waiting:
                for other in empty[waiting.pop()]:
                    if other not in nodes:
                        nodes.add(other)
                        waiting.append(other)
            return frozenset(nodes)

        known: dict[frozenset[int], int] = {}
        queue: deque[frozenset[int]] = deque()
        work = 0

        def state(nodes: set[int]) -> int:
            nonlocal work
            held = closed(nodes)
            work += len(held)
            if work > _MAX_SUBSETS:
                raise ConstraintError(_TOO_LARGE)
            if held not in known:
                if len(self.steps) >= MOST_STATES:
                    raise ConstraintError(_TOO_LARGE)
                known[held] = len(self.steps)
                self.steps.append({})
                self.calls.append([])
                self.ends.append(number if end in held else -1)
                queue.append(held)
            return known[held]

        begun = state({start})
        while queue:
            held = queue.popleft()
            ahead: dict[int, set[int]] = {}
            for one in held:
                for label, nodes in edges[one].items():
                    ahead.setdefault(label, set()).update(nodes)
            for label in sorted(ahead):
                behind = state(ahead[label])
                if label >= 0:
                    self.steps[known[held]][label] = behind
                else:
                    self.calls[known[held]].append((-1 - label, behind))
        return begun

    def _reaching(self, *, follow_steps: bool) -> set[int]:
        """The states from which the end of their rule is reached; without `follow_steps`, by the
        empty text."""
        before: dict[int, list[int]] = {}
        callers: dict[int, list[tuple[int, int]]] = {}  # by the state behind the call
        calling: dict[int, list[tuple[int, int]]] = {}  # by the rule
        for state, steps in enumerate(self.steps):
            for to in steps.values() if follow_steps else ():
                before.setdefault(to, []).append(state)
            for rule, to in self.calls[state]:
                callers.setdefault(to, []).append((rule, state))
                calling.setdefault(rule, []).append((to, state))
        rules: dict[int, list[int]] = {}
        for rule, start in enumerate(self.starts):
            rules.setdefault(start, []).append(rule)
        found = {state for state, rule in enumerate(self.ends) if rule >= 0}
        waiting = [*found]
        while waiting:
            done = waiting.pop()
            ahead = list(before.get(done, ()))
            ahead += [one for rule, one in callers.get(done, ()) if self.starts[rule] in found]
            for rule in rules.get(done, ()):
                ahead += [one for to, one in calling.get(rule, ()) if to in found]
            for one in ahead:
                if one not in found:
                    found.add(one)
                    waiting.append(one)
        return found

    def _trim(self) -> None:
        """Keep what is on the way to an end, and find the rules of the empty text."""
        useful = self._reaching(follow_steps=True)
        empty = self._reaching(follow_steps=False)
        whole = {rule for rule, start in enumerate(self.starts) if start in useful}
        none = {rule for rule, start in enumerate(self.starts) if start in empty}
        if self.starts[0] not in useful:
            raise ConstraintError("the constraint cannot be met: the grammar has no finite text")
        self.nullable = frozenset(none)
        for state in range(len(self.steps)):
            step = self.steps[state]
            self.steps[state] = {one: to for one, to in step.items() if to in useful}
            self.calls[state] = [
                (rule, to) for rule, to in self.calls[state] if rule in whole and to in useful
            ]


@lru_cache(maxsize=32)
def byte_grammar(described: str) -> ByteGrammar:
    """The automata of what `GuidanceState.origin` says: a Lark grammar, or llguidance's JSON with
    one grammar in it. Raises `ConstraintError` for what cannot be read."""
    text = described
    if described.lstrip().startswith("{"):
        held = json.loads(described)
        grammars = held.get("grammars", []) if isinstance(held, dict) else []
        if len(grammars) != 1 or not grammars[0].get("lark_grammar"):
            raise ConstraintError("diffusion-cfg reads grammars, regular expressions and choices")
        text = grammars[0]["lark_grammar"]
    text = re.sub(r"^%llguidance\s*\{\s*\}[ \t]*$", "", text, flags=re.MULTILINE)
    try:
        return ByteGrammar(_inlined(Rules(text).spelled()))
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply") from None
