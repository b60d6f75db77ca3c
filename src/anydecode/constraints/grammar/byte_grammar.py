"""Context-free grammars over bytes: one deterministic automaton per rule, whose edges are byte
classes or calls of other rules.

Grammars are parsed from Lark's notation without templates and imports other than from `common`.
Terminals are expanded in the rules, so there is no lexer and no longest match; texts of `%ignore`
may come before every terminal and at the end. Rules that are not recursive are inlined, so a
grammar without recursion is a single automaton.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable

from anydecode.constraints.byte_cache import ByteCache
from anydecode.constraints.grammar.byte_regex import (
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

#: Maximum number of parts of an inlined rule, and of states of all automata together.
MAX_INLINED_PARTS, MAX_STATES = 20_000, 20_000
#: Maximum size of the automata that are cached, in bytes.
MAX_CACHED_BYTES = 32 << 20
_TOKEN_PATTERN = re.compile(
    r"""(?P<space>[ \t\r\f]+|(//|\#)[^\n]*)|(?P<line>\n)
    |(?P<string>"(\\.|[^"\\\n])*"i?)|(?P<regex>/(?![*?/])(\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[!?]?_*[A-Za-z][A-Za-z0-9_\-]*)|(?P<number>\d+)
    |(?P<sign>->|\.\.|[:|()\[\]?*+~.,{}%])""",
    re.VERBOSE,
)
#: llguidance's options, which change no text: `Grammar` may add one that forces no tokens.
_OPTIONS = re.compile(
    r'^%llguidance\s*\{\s*("no_forcing"\s*:\s*(true|false)\s*)?\}[ \t]*$', re.MULTILINE
)
_TOO_LARGE = "the grammar is too large: make its repetitions smaller or its rules fewer"
#: Maximum number of NFA states summed over the DFA states of a rule: time and memory of the subset
#: construction are proportional to it.
_MAX_SUBSETS = 4_000_000
_START = "start"
_DECIMAL, _EXPONENT = r"([0-9]+\.[0-9]*|\.[0-9]+)", "[eE][+-]?[0-9]+"
_FLOAT = f"([0-9]+{_EXPONENT}|{_DECIMAL}({_EXPONENT})?)"
#: Terminals of Lark's library, as regular expressions.
_COMMON_TERMINALS = {
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
    """Parses grammar text: `rules[name]` is a rule as an expression."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Expression] = {}
        self.ignored: list[Expression] = []
        self._tokens: list[tuple[str, str]] = []
        self._index = 0
        self._num_parts = 0
        self._scan(text)
        while self._index < len(self._tokens):
            self._statement()
        if _START not in self.rules:
            raise ConstraintError("the grammar has no rule named start")
        self._check(self.rules.values())

    def _scan(self, text: str) -> None:
        position, depth = 0, 0
        while position < len(text):
            match = _TOKEN_PATTERN.match(text, position)
            if match is None:
                line = text[position:].partition("\n")[0][:40]
                raise ConstraintError(f"this part of the grammar is not supported: {line!r}")
            position, kind, value = match.end(), str(match.lastgroup), match.group()
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(value, 0) if kind == "sign" else 0
            if kind == "line" and depth <= 0:
                self._tokens.append((kind, value))
            elif kind == "sign" and value == "|":
                while self._tokens and self._tokens[-1][0] == "line":
                    self._tokens.pop()  # an alternative on a line of its own
                self._tokens.append((kind, value))
            elif kind not in ("space", "line"):
                self._tokens.append((kind, value))
        self._tokens.append(("line", "\n"))

    def _next(self, *signs: str) -> str | None:
        """Consumes and returns the next sign if it is one of `signs`; else None."""
        kind, value = self._tokens[self._index]
        if kind == "sign" and value in signs:
            self._index += 1
            return value
        return None

    def _take(self, kind: str) -> str:
        actual_kind, value = self._tokens[self._index]
        if actual_kind != kind:
            raise ConstraintError(f"the grammar has {value!r} where a {kind} is expected")
        self._index += 1
        return value

    def _statement(self) -> None:
        if self._tokens[self._index][0] == "line":
            self._index += 1
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
                self._take("number")  # a priority: affects parses, not which texts are allowed
            if not self._next(":"):
                raise ConstraintError(f"the rule {name} of the grammar has no ':' after its name")
            self._define(name, self._alternatives())
        self._take("line")

    def _define(self, name: str, rule: Expression) -> None:
        if name in self.rules:
            raise ConstraintError(f"the grammar has two rules named {name}")
        self.rules[name] = rule

    def _import(self) -> None:
        """Defines imported terminals of Lark's library `common`."""
        names: list[str] = []
        library = self._take("name")
        if self._next("."):
            names.append(self._take("name"))
        else:
            while self._next("(", ","):
                names.append(self._take("name"))
            if not self._next(")"):
                raise ConstraintError("an import of the grammar is not closed")
        unknown = next(
            (name for name in names if library != "common" or name not in _COMMON_TERMINALS), None
        )
        if unknown is not None:
            raise ConstraintError(f"the grammar's import {library}.{unknown} is not supported here")
        renamed = self._take("name") if self._next("->") else None
        for name in names:
            self._define(renamed or name, ("terminal", read_regex(_COMMON_TERMINALS[name])))

    def _alternatives(self) -> Expression:
        parts = [self._concatenation()]
        while self._next("|"):
            parts.append(self._concatenation())
        return choice(parts)

    def _concatenation(self) -> Expression:
        parts: list[Expression] = []
        while True:
            kind, value = self._tokens[self._index]
            if kind == "line" or value in ("|", ")", "]"):
                return sequence(parts)
            if self._next("->"):
                self._take("name")
                return sequence(parts)
            parts.append(self._repetition())

    def _repetition(self) -> Expression:
        part = self._atom()
        while sign := self._next("?", "*", "+", "~", "{"):
            if sign in "?*+":
                min_count, max_count = {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign]
            else:
                min_count = self._number()
                separator = self._next("..", ",")
                open_ended = separator == "," and self._tokens[self._index][0] != "number"
                max_count = None if open_ended else self._number() if separator else min_count
                if sign == "{" and not self._next("}"):
                    raise ConstraintError("a repetition in the grammar is not closed")
            self._num_parts += size(part) * num_copies(min_count, max_count)
            if self._num_parts > MAX_PARTS:
                raise ConstraintError(_TOO_LARGE)
            part = repeated(part, min_count, max_count)
        return part

    def _number(self) -> int:
        value = self._take("number")
        if len(value) > 9:
            raise ConstraintError("a repetition in the grammar has a number of more than 9 digits")
        return int(value)

    def _atom(self) -> Expression:
        kind, value = self._tokens[self._index]
        self._index += 1
        if kind == "name":
            return ("ref", value.lstrip("!?"))
        if kind == "string":
            text, ignore_case = _string(value)
            if self._next(".."):
                last, _ = _string(self._take("string"))
                if len(text) != 1 or len(last) != 1 or last < text:
                    raise ConstraintError(f"the grammar's range {text!r}..{last!r} is not valid")
                return ("terminal", characters([(ord(text), ord(last))]))
            return ("terminal", literal(text, ignore_case))
        if kind == "regex":
            body, _, flags = value[1:].rpartition("/")
            return ("terminal", read_regex(body, flags))
        if kind == "sign" and value in "([":
            inner = self._alternatives()
            closing_bracket = ")" if value == "(" else "]"
            if not self._next(closing_bracket):
                raise ConstraintError(f"the grammar has a {value!r} that is not closed")
            return inner if value == "(" else choice([EMPTY, inner])
        raise ConstraintError(f"the grammar has an unexpected {value!r}")

    def _check(self, rules: object) -> None:
        for name, rule in [*self.rules.items(), *(("%ignore", part) for part in self.ignored)]:
            for used in sorted(_refs(rule)):
                if used not in self.rules:
                    raise ConstraintError(f"{name} of the grammar uses {used}, which has no rule")

    def expanded(self) -> dict[str, Expression]:
        """The rules with terminals expanded and ignored texts inserted. The first rule, "", is the
        root that contains `start`."""
        terminals: dict[str, Expression] = {}

        def terminal(name: str, enclosing: tuple[str, ...]) -> Expression:
            if name in enclosing:
                raise ConstraintError(f"the terminal {name} of the grammar contains itself")
            if not _is_terminal(name):
                raise ConstraintError(f"the terminal {enclosing[-1]} of the grammar uses a rule")
            if name not in terminals:
                terminals[name] = expand_terminals(self.rules[name], (*enclosing, name))
            return terminals[name]

        def expand_terminals(part: Expression, enclosing: tuple[str, ...]) -> Expression:
            if part[0] == "ref":
                return terminal(part[1], enclosing)
            return (
                part[1]
                if part[0] == "terminal"
                else _map_parts(part, lambda part: expand_terminals(part, enclosing))
            )

        ignored: Expression = (
            "star",
            choice([expand_terminals(part, ("%ignore",)) for part in self.ignored]),
        )

        def insert_ignored(part: Expression) -> Expression:
            if part[0] == "ref" and not _is_terminal(part[1]):
                return part
            if part[0] in ("ref", "terminal"):
                expanded = expand_terminals(part, ())
                return sequence([ignored, expanded]) if self.ignored else expanded
            return _map_parts(part, insert_ignored)

        root = sequence([("ref", _START), ignored] if self.ignored else [("ref", _START)])
        rules = {
            name: insert_ignored(rule)
            for name, rule in self.rules.items()
            if not _is_terminal(name)
        }
        return {"": root, **rules}


def _string(value: str) -> tuple[str, bool]:
    ignore_case = value.endswith("i")
    quoted = value[:-1] if ignore_case else value
    try:
        return json.loads(quoted), ignore_case
    except ValueError:
        raise ConstraintError(f"{quoted} in the grammar is not a valid string") from None


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _map_parts(part: Expression, change: object) -> Expression:
    kind, body = part
    if kind == "set" or kind == "ref":
        return part
    if kind == "star":
        return (kind, change(body))  # type: ignore[operator]
    return (kind, tuple(change(part) for part in body))  # type: ignore[operator]


def _refs(part: Expression) -> set[str]:
    kind, body = part
    if kind == "ref":
        return {body}
    if kind in ("set", "terminal"):
        return set()
    return _refs(body) if kind == "star" else {name for part in body for name in _refs(part)}


def _inlined(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules with non-recursive rules inlined where they are used."""
    if any(size(rule) > MAX_PARTS for rule in rules.values()):
        raise ConstraintError(_TOO_LARGE)
    uses = {name: _refs(rule) for name, rule in rules.items()}
    below: dict[str, set[str]] = {}
    for name in rules:
        seen: set[str] = set()
        stack = [*uses[name]]
        while stack:
            used = stack.pop()
            if used not in seen:
                seen.add(used)
                stack += uses[used]
        below[name] = seen
    inlined: dict[str, Expression] = {}
    sizes: dict[str, int] = {}

    def inline(part: Expression) -> Expression:
        if part[0] == "ref":
            fits = part[1] not in below[part[1]] and sizes[part[1]] <= MAX_INLINED_PARTS
            return inlined[part[1]] if fits else part
        return _map_parts(part, inline)

    for name in sorted(rules, key=lambda name: len(below[name])):  # used rules come first
        if name not in below[name]:
            inlined[name] = inline(rules[name])
            sizes[name] = size(inlined[name])
            if sizes[name] > MAX_PARTS:
                raise ConstraintError(_TOO_LARGE)
    for name in rules:
        if name in below[name]:
            inlined[name] = inline(rules[name])
    return inlined


class ByteGrammar:
    """The automata of a grammar's rules; states are numbered across all automata.

    Every state leads to the end of its rule.

    Attributes:
        classes: A table for `bytes.translate` from bytes to classes. Bytes of one class have the
            same transitions everywhere.
        dead_class: The class of bytes without any transition.
        transitions: `transitions[state]` maps byte classes to states.
        rule_calls: `rule_calls[state]` are pairs (rule, state after the rule).
        completed_rule: `completed_rule[state]` is the rule that is complete at the state, or -1.
        start_states: `start_states[rule]` is the first state of a rule; rule 0 is the whole text.
        nullable: The rules that derive the empty text.
        is_regular: Whether there are no rule calls.

    Args:
        rules: Expressions by rule name; rule "" is the whole text.

    Raises:
        ConstraintError: The grammar contains no finite text, or is too large.
    """

    def __init__(self, rules: dict[str, Expression]) -> None:
        rule_names, stack = [""], [""]
        while stack:
            for name in sorted(_refs(rules[stack.pop()])):
                if name not in rule_names:
                    rule_names.append(name)
                    stack.append(name)
        self._number = {name: number for number, name in enumerate(rule_names)}
        self._classify([rules[name] for name in rule_names])
        self.transitions: list[dict[int, int]] = []
        self.rule_calls: list[list[tuple[int, int]]] = []
        self.completed_rule: list[int] = []
        self.start_states = [
            self._automaton(rules[name], self._number[name]) for name in rule_names
        ]
        self._trim()
        self.is_regular = not any(self.rule_calls)

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the automata, in bytes."""
        num_edges = sum(map(len, self.transitions)) + sum(map(len, self.rule_calls))
        return 400 * len(self.transitions) + 100 * num_edges

    def _classify(self, rules: list[Expression]) -> None:
        sets: dict[int, int] = {}

        def collect(part: Expression) -> None:
            kind, body = part
            if kind == "set":
                sets.setdefault(body, len(sets))
            elif kind == "star":
                collect(body)
            elif kind != "ref":
                for part in body:
                    collect(part)

        for rule in rules:
            collect(rule)
        class_by_signature: dict[tuple[bool, ...], int] = {}
        class_of_byte = []
        for byte in range(256):
            signature = tuple(bool(mask >> byte & 1) for mask in sets)
            class_of_byte.append(class_by_signature.setdefault(signature, len(class_by_signature)))
        self.classes = bytes(class_of_byte)
        self.dead_class = class_by_signature[(False,) * len(sets)]  # no UTF-8 has the byte 255
        self._members = {
            mask: sorted({class_of_byte[byte] for byte in range(256) if mask >> byte & 1})
            for mask in sets
        }

    def _automaton(self, rule: Expression, number: int) -> int:
        """Builds the automaton of a rule by Thompson's construction and the subset construction.
        Returns the start state."""
        epsilon: list[list[int]] = []
        edges: list[dict[int, list[int]]] = []  # by class, or by -1 - rule

        def new_node() -> int:
            if len(edges) > 8 * MAX_STATES:
                raise ConstraintError(_TOO_LARGE)
            epsilon.append([])
            edges.append({})
            return len(edges) - 1

        def build_nfa(part: Expression, first: int) -> int:
            kind, body = part
            if kind in ("set", "ref"):
                last = new_node()
                labels = self._members[body] if kind == "set" else [-1 - self._number[body]]
                for label in labels:
                    edges[first].setdefault(label, []).append(last)
                return last
            if kind == "seq":
                for part in body:
                    first = build_nfa(part, first)
                return first
            if kind == "star":
                inner = new_node()
                epsilon[first].append(inner)
                epsilon[build_nfa(body, inner)].append(inner)
                last = new_node()
                epsilon[inner].append(last)
                return last
            last = new_node()
            if kind == "first":
                for part in body:
                    epsilon[first].append(last)
                    first = build_nfa(part, first)
                epsilon[first].append(last)
                return last
            for part in body:
                inner = new_node()
                epsilon[first].append(inner)
                epsilon[build_nfa(part, inner)].append(last)
            return last

        start = new_node()
        end = build_nfa(rule, start)

        def epsilon_closure(nodes: set[int]) -> frozenset[int]:
            stack = [*nodes]
            while stack:
                for other in epsilon[stack.pop()]:
                    if other not in nodes:
                        nodes.add(other)
                        stack.append(other)
            # Others only lead on: without them, equal states are found to be equal.
            return frozenset(node for node in nodes if edges[node] or node == end)

        states: dict[frozenset[int], int] = {}
        queue: deque[frozenset[int]] = deque()
        work = 0

        def state(nodes: set[int]) -> int:
            nonlocal work
            subset = epsilon_closure(nodes)
            work += len(subset)
            if work > _MAX_SUBSETS:
                raise ConstraintError(_TOO_LARGE)
            if subset not in states:
                if len(self.transitions) >= MAX_STATES:
                    raise ConstraintError(_TOO_LARGE)
                states[subset] = len(self.transitions)
                self.transitions.append({})
                self.rule_calls.append([])
                self.completed_rule.append(number if end in subset else -1)
                queue.append(subset)
            return states[subset]

        start_state = state({start})
        while queue:
            subset = queue.popleft()
            targets: dict[int, set[int]] = {}
            for nfa_node in subset:
                for label, nodes in edges[nfa_node].items():
                    targets.setdefault(label, set()).update(nodes)
            for label in sorted(targets):
                target = state(targets[label])
                if label >= 0:
                    self.transitions[states[subset]][label] = target
                else:
                    self.rule_calls[states[subset]].append((-1 - label, target))
        return start_state

    def _states_reaching_end(self, *, follow_steps: bool) -> set[int]:
        """The states from which the end of their rule can be reached; without `follow_steps`, by
        the empty text."""
        predecessors: dict[int, list[int]] = {}
        callers: dict[int, list[tuple[int, int]]] = {}  # by the state after the call
        call_sites: dict[int, list[tuple[int, int]]] = {}  # by the rule
        for state, transitions in enumerate(self.transitions):
            for to in transitions.values() if follow_steps else ():
                predecessors.setdefault(to, []).append(state)
            for rule, to in self.rule_calls[state]:
                callers.setdefault(to, []).append((rule, state))
                call_sites.setdefault(rule, []).append((to, state))
        rules: dict[int, list[int]] = {}
        for rule, start in enumerate(self.start_states):
            rules.setdefault(start, []).append(rule)
        reaching = {state for state, rule in enumerate(self.completed_rule) if rule >= 0}
        stack = [*reaching]
        while stack:
            reached = stack.pop()
            sources = list(predecessors.get(reached, ()))
            sources += [
                source
                for rule, source in callers.get(reached, ())
                if self.start_states[rule] in reaching
            ]
            for rule in rules.get(reached, ()):
                sources += [source for to, source in call_sites.get(rule, ()) if to in reaching]
            for source in sources:
                if source not in reaching:
                    reaching.add(source)
                    stack.append(source)
        return reaching

    def _trim(self) -> None:
        """Removes states that reach no end of a rule, and finds the nullable rules."""
        useful = self._states_reaching_end(follow_steps=True)
        nullable_states = self._states_reaching_end(follow_steps=False)
        non_empty_rules = {rule for rule, start in enumerate(self.start_states) if start in useful}
        nullable_rules = {
            rule for rule, start in enumerate(self.start_states) if start in nullable_states
        }
        if self.start_states[0] not in useful:
            raise ConstraintError("the constraint cannot be met: the grammar has no finite text")
        self.nullable = frozenset(nullable_rules)
        for state in range(len(self.transitions)):
            step = self.transitions[state]
            self.transitions[state] = {
                byte_class: to for byte_class, to in step.items() if to in useful
            }
            self.rule_calls[state] = [
                (rule, to)
                for rule, to in self.rule_calls[state]
                if rule in non_empty_rules and to in useful
            ]


_grammars: ByteCache[str, ByteGrammar] = ByteCache(MAX_CACHED_BYTES)


def byte_grammar(description: str) -> ByteGrammar:
    """Returns the automata of a grammar, cached.

    Args:
        description: The value of `GuidanceState.origin`: a Lark grammar, or llguidance's JSON with
            one grammar in it.

    Raises:
        ConstraintError: The grammar is not supported or too large.
    """
    found = _grammars.get(description)
    if found is None:
        found = _read_grammar(description)
        _grammars.put(description, found, 4 * len(description) + found.num_bytes)
    return found


def _read_grammar(description: str) -> ByteGrammar:
    text = description
    if description.lstrip().startswith("{"):
        parsed = json.loads(description)
        grammars = parsed.get("grammars", []) if isinstance(parsed, dict) else []
        if len(grammars) != 1 or not grammars[0].get("lark_grammar"):
            raise ConstraintError(
                "diffusion-cfg supports grammars, regular expressions and choices only"
            )
        text = grammars[0]["lark_grammar"]
    text = _OPTIONS.sub("", text)
    return grammar_of(lambda: Rules(text).expanded())


def grammar_of(rules: Callable[[], dict[str, Expression]]) -> ByteGrammar:
    """The automata of the rules that `rules` returns, with non-recursive rules inlined.

    Raises:
        ConstraintError: The grammar is not supported or too large.
    """
    try:
        return ByteGrammar(_inlined(rules()))
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply") from None
