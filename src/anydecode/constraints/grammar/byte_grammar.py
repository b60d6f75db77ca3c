"""Context-free grammars over bytes: one deterministic automaton per rule, whose edges are byte
classes or calls of other rules.

Grammars are parsed from Lark's notation without templates and imports other than from `common`.
Terminals are longest matches (see `longest_match`); texts of `%ignore` may come before every
terminal and at the end. Rules that are not recursive are inlined, so a grammar without recursion is
a single automaton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from anydecode.constraints.byte_cache import ByteCache
from anydecode.constraints.grammar.automata import (
    MAX_STATES,
    TOO_LARGE,
    byte_classes,
    determinize,
    leaves,
)
from anydecode.constraints.grammar.byte_regex import (
    EMPTY,
    MAX_PARTS,
    Expression,
    characters,
    choice,
    literal,
    map_parts,
    matches_empty,
    num_copies,
    read_regex,
    repeated,
    sequence,
    size,
)
from anydecode.constraints.grammar.longest_match import with_longest_match
from anydecode.errors import ConstraintError

#: Maximum number of parts of an inlined rule.
MAX_INLINED_PARTS = 20_000
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
                raise ConstraintError(TOO_LARGE)
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

    def rules_and_ignored(self) -> tuple[dict[str, Expression], Expression | None]:
        """The rules, with terminals as `("terminal", expression over bytes)`, and the ignored text.
        The first rule, "", is the whole text."""
        terminals: dict[str, Expression] = {}

        def terminal(name: str, enclosing: tuple[str, ...]) -> Expression:
            if name in enclosing:
                raise ConstraintError(f"the terminal {name} of the grammar contains itself")
            if not _is_terminal(name):
                raise ConstraintError(f"the terminal {enclosing[-1]} of the grammar uses a rule")
            if name not in terminals:
                terminals[name] = expanded(self.rules[name], (*enclosing, name))
            return terminals[name]

        def expanded(part: Expression, enclosing: tuple[str, ...]) -> Expression:
            if part[0] == "ref":
                return terminal(part[1], enclosing)
            return (
                part[1]
                if part[0] == "terminal"
                else map_parts(part, lambda part: expanded(part, enclosing))
            )

        def with_terminals(part: Expression) -> Expression:
            if part[0] == "ref" and not _is_terminal(part[1]):
                return part
            if part[0] in ("ref", "terminal"):
                found = expanded(part, ())
                leaf: Expression = ("terminal", found)
                return choice([EMPTY, leaf]) if matches_empty(found) else leaf
            return map_parts(part, with_terminals)

        rules = {
            name: with_terminals(rule)
            for name, rule in self.rules.items()
            if not _is_terminal(name)
        }
        ignored = [expanded(part, ("%ignore",)) for part in self.ignored]
        return {"": ("ref", _START), **rules}, choice(ignored) if ignored else None


def _string(value: str) -> tuple[str, bool]:
    ignore_case = value.endswith("i")
    quoted = value[:-1] if ignore_case else value
    try:
        return json.loads(quoted), ignore_case
    except ValueError:
        raise ConstraintError(f"{quoted} in the grammar is not a valid string") from None


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _refs(part: Expression) -> set[str]:
    return {body for kind, body in leaves(part) if kind == "ref"}


def _used(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules that rule "" uses, itself first."""
    found, stack = {"": rules[""]}, [""]
    while stack:
        for name in sorted(_refs(rules[stack.pop()])):
            if name not in found:
                found[name] = rules[name]
                stack.append(name)
    return found


def inlined(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules with non-recursive rules inlined where they are used.

    Raises:
        ConstraintError: They are too large.
    """
    if any(size(rule) > MAX_PARTS for rule in rules.values()):
        raise ConstraintError(TOO_LARGE)
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
    result: dict[str, Expression] = {}
    sizes: dict[str, int] = {}

    def inline(part: Expression) -> Expression:
        if part[0] == "ref":
            fits = part[1] not in below[part[1]] and sizes[part[1]] <= MAX_INLINED_PARTS
            return result[part[1]] if fits else part
        return map_parts(part, inline)

    for name in sorted(rules, key=lambda name: len(below[name])):  # used rules come first
        if name not in below[name]:
            result[name] = inline(rules[name])
            sizes[name] = size(result[name])
            if sizes[name] > MAX_PARTS:
                raise ConstraintError(TOO_LARGE)
    for name in rules:
        if name in below[name]:
            result[name] = inline(rules[name])
    return result


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
        rules = _used(rules)
        number = {name: place for place, name in enumerate(rules)}
        sets = (leaf[1] for rule in rules.values() for leaf in leaves(rule) if leaf[0] == "set")
        class_of_byte, members = byte_classes(sets)
        self.classes = bytes(class_of_byte)
        self.dead_class = class_of_byte[255]  # no UTF-8 has the byte 255
        self.transitions: list[dict[int, int]] = []
        self.rule_calls: list[list[tuple[int, int]]] = []
        self.completed_rule: list[int] = []
        self.start_states: list[int] = []

        def labels(leaf: Expression) -> list[int]:
            return members[leaf[1]] if leaf[0] == "set" else [-1 - number[leaf[1]]]

        for name, rule in rules.items():
            first = len(self.transitions)
            self.start_states.append(first)
            found, is_final = determinize(rule, labels, MAX_STATES - first)
            self.completed_rule += [number[name] if final else -1 for final in is_final]
            for targets in found:
                moved = [(label, first + to) for label, to in targets.items()]
                self.transitions.append({label: to for label, to in moved if label >= 0})
                self.rule_calls.append([(-1 - label, to) for label, to in moved if label < 0])
        self._trim()
        self.is_regular = not any(self.rule_calls)

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the automata, in bytes."""
        num_edges = sum(map(len, self.transitions)) + sum(map(len, self.rule_calls))
        return 400 * len(self.transitions) + 100 * num_edges

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

    def rules() -> dict[str, Expression]:
        found, ignored = Rules(text).rules_and_ignored()
        return with_longest_match(_used(inlined(found)), ignored)

    return grammar_of(rules)


def grammar_of(rules: Callable[[], dict[str, Expression]]) -> ByteGrammar:
    """The automata of the rules that `rules` returns.

    Raises:
        ConstraintError: The grammar is not supported or too large.
    """
    try:
        return ByteGrammar(rules())
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply") from None
