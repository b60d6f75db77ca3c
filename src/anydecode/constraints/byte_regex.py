"""Regular expressions as expressions over bytes: characters become their UTF-8 sequences.

An expression is a tuple: `("set", mask)` one byte of a set (bit b: byte b), `("seq", parts)`,
`("alt", parts)`, `("first", parts)` as many of them as wanted, `("star", part)`, and
`("ref", name)` a rule of a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from anydecode.errors import ConstraintError

Expression = tuple[str, Any]
Ranges = list[tuple[int, int]]

#: The empty text.
EMPTY: Expression = ("seq", ())
#: Copies that a bounded repetition may have.
MOST_COPIES = 2_000
#: Parts that the expression of a pattern may have with its repetitions written out, the groups that
#: may stand within each other, and the ranges of one class.
MAX_PARTS, MAX_DEPTH, MAX_RANGES = 160_000, 100, 10_000
_LAST = 0x10FFFF
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ASCII: dict[str, Ranges] = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
_LIKE: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda one: one.isalnum() or one == "_",
    "s": str.isspace,
}


def sequence(parts: Iterable[Expression]) -> Expression:
    """One after the other."""
    held = tuple(parts)
    return held[0] if len(held) == 1 else ("seq", held)


def choice(parts: Iterable[Expression]) -> Expression:
    """One of them."""
    held = tuple(parts)
    return held[0] if len(held) == 1 else ("alt", held)


def num_copies(least: int, most: int | None) -> int:
    """How often a repetition of `least` to `most` times writes its part."""
    return max(1, least + 1 if most is None else most)


def size(part: Expression) -> int:
    """The number of parts of an expression, itself included; what stands in several places is
    looked at once."""
    known: dict[int, int] = {}

    def of(part: Expression) -> int:
        kind, held = part
        if kind in ("set", "ref"):
            return 1
        if id(part) not in known:
            inner = (held,) if kind in ("star", "terminal") else held
            known[id(part)] = 1 + sum(map(of, inner))
        return known[id(part)]

    return of(part)


def repeated(part: Expression, least: int, most: int | None) -> Expression:
    """`least` to `most` times (None: without end)."""
    if max(least, most or 0) > MOST_COPIES:
        raise ConstraintError(f"a repetition of more than {MOST_COPIES} is not supported")
    if most is not None and most < least:
        raise ConstraintError(f"a repetition from {least} to {most} times is none")
    if most is None:
        return sequence([*[part] * least, ("star", part)])
    return sequence([*[part] * least, ("first", (part,) * (most - least))])


def literal(text: str, ignore_case: bool = False) -> Expression:
    """Exactly `text`; with `ignore_case` ASCII letters of either case."""
    parts: list[Expression] = []
    for byte in text.encode("utf-8", "surrogatepass"):
        both = {byte, *(bytes([byte]).swapcase() if ignore_case and byte < 128 else b"")}
        parts.append(("set", sum(1 << one for one in both)))
    return sequence(parts)


def characters(ranges: Ranges) -> Expression:
    """One character within `ranges` of code points (inclusive), as UTF-8."""
    rows: list[list[int]] = []
    for first, last in _joined(ranges):
        for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
            for edge in (0x7F, 0x7FF, 0xFFFF, _LAST):
                if low <= min(high, edge):
                    rows += _utf8(low, min(high, edge))
                    low = edge + 1
    return _tree(rows)


def _tree(rows: list[list[int]]) -> Expression:
    """Any of these sequences of byte sets."""
    last = 0
    ahead: dict[int, list[list[int]]] = {}
    for row in rows:
        if len(row) == 1:
            last |= row[0]
        else:
            ahead.setdefault(row[0], []).append(row[1:])
    parts = [sequence([("set", step), _tree(rest)]) for step, rest in ahead.items()]
    return choice([("set", last), *parts] if last else parts)


def _utf8(first: int, last: int) -> list[list[int]]:
    """Sequences of byte sets that spell `first`..`last`, all of one length."""
    low, high = chr(first).encode(), chr(last).encode()

    def split(low: bytes, high: bytes) -> list[list[int]]:
        if len(low) == 1:
            return [[_span(low[0], high[0])]]
        least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
        if low[0] == high[0]:
            return [[1 << low[0], *rest] for rest in split(low[1:], high[1:])]
        found = []
        start, stop = low[0], high[0]
        if low[1:] != least:
            found += [[1 << start, *rest] for rest in split(low[1:], most)]
            start += 1
        if high[1:] != most:
            found += [[1 << stop, *rest] for rest in split(least, high[1:])]
            stop -= 1
        if start <= stop:
            found.append([_span(start, stop), *[_span(0x80, 0xBF)] * len(least)])
        return found

    return split(low, high)


def _span(first: int, last: int) -> int:
    return (1 << (last + 1)) - (1 << first)


def _joined(ranges: Ranges) -> Ranges:
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _others(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for first, last in [*_joined(ranges), (_LAST + 1, _LAST + 1)]:
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    return found


@cache
def _widest(kind: str) -> tuple[tuple[int, int], ...]:
    """Every character that any reading of a shorthand includes."""
    like = _LIKE[kind]
    return tuple(_joined([(one, one) for one in range(_LAST + 1) if like(chr(one))]))


class _Reader:
    def __init__(self, pattern: str, flags: str, max_parts: int) -> None:
        unknown = set(flags) - set("isu")
        if unknown:
            raise ConstraintError(f"the flag {min(unknown)!r} of a regular expression")
        self.text, self.at = pattern, 0
        self.ignore_case, self.dot_all = "i" in flags, "s" in flags
        self.num_parts, self.max_parts = 0, max_parts
        self.depth = 0

    def peek(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def take(self) -> str:
        if self.at >= len(self.text):
            raise self.refuse("an end too early")
        self.at += 1
        return self.text[self.at - 1]

    def refuse(self, what: str) -> ConstraintError:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return ConstraintError(f"{what} in the regular expression {shown!r}")

    def count(self, parts: int) -> None:
        self.num_parts += parts
        if self.num_parts > self.max_parts:
            raise self.refuse(
                f"more than {self.max_parts} parts, repetitions written out (make them smaller),"
            )

    def whole(self) -> Expression:
        found = self.alternatives()
        if self.at < len(self.text):
            raise self.refuse(f"an unexpected {self.text[self.at]!r}")
        return found

    def alternatives(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.refuse(f"more than {MAX_DEPTH} groups within each other")
        parts = [self.row()]
        while self.peek("|"):
            parts.append(self.row())
        self.depth -= 1
        return choice(parts)

    def row(self) -> Expression:
        parts: list[Expression] = []
        self.count(1)
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            before = self.num_parts
            part = self.atom()
            while (bounds := self.bounds()) is not None:
                self.count((self.num_parts - before) * (num_copies(*bounds) - 1))
                part = repeated(part, *bounds)
                self.peek("?")  # as few as possible: the same texts
            parts.append(part)
        return sequence(parts)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.peek(sign):
                return least, most
        if not self.peek("{"):
            return None
        end = self.text.find("}", self.at, self.at + 20)
        inner = self.text[self.at : end] if end >= 0 else ""
        first, comma, second = (one.strip() for one in inner.partition(","))
        numbers = [one for one in (first, second) if one]
        if not numbers or not all(n.isascii() and n.isdigit() for n in numbers):
            raise self.refuse("a '{' that is no repetition")
        self.at += len(inner) + 1
        least = int(first or 0)
        return least, least if not comma else int(second) if second else None

    def atom(self) -> Expression:
        sign = self.take()
        if sign == "(":
            if self.peek("?"):
                self.group()
            found = self.alternatives()
            if self.take() != ")":
                raise self.refuse("a group that is not closed")
            return found
        if sign == "[":
            return self.one_of(self.set())
        if sign == ".":
            return self.one_of([(0, _LAST)] if self.dot_all else _others([(10, 10)]))
        if sign == "\\":
            return self.one_of(self.escape(outside=True))
        if sign in "^$":
            raise self.refuse(f"an anchor ({sign})")
        if sign in "*+?{":
            raise self.refuse(f"nothing to repeat before {sign!r}")
        return self.one_of([(ord(sign), ord(sign))])

    def group(self) -> None:
        if self.peek(":"):
            return
        named = self.peek("P<") or self.peek("<")
        if not named or self.text[self.at : self.at + 1] in ("=", "!", ""):
            raise self.refuse("look-around or flags, which are not supported,")
        while self.take() != ">":
            pass

    def one_of(self, ranges: Ranges) -> Expression:
        if self.ignore_case:
            ranges = ranges + self.swapped(ranges)
        found = characters(ranges)
        self.count(size(found))
        return found

    @staticmethod
    def swapped(ranges: Ranges) -> Ranges:
        """The ASCII letters of `ranges` in the other case."""
        found = []
        for first, last in ranges:
            for start, stop, shift in ((65, 90, 32), (97, 122, -32)):
                low, high = max(first, start), min(last, stop)
                if low <= high:
                    found.append((low + shift, high + shift))
        return found

    def set(self) -> Ranges:
        negated = self.peek("^")
        ranges: Ranges = []
        begun = self.at
        while self.at == begun or not self.peek("]"):  # in front a "]" is itself
            first = self.member(negated)
            behind = self.text[self.at : self.at + 2]
            if len(behind) == 2 and behind[0] == "-" and behind[1] != "]":
                self.at += 1
                last = self.member(negated)
                if not (len(first) == len(last) == 1 and first[0][0] == first[0][1]):
                    raise self.refuse("a range of classes")
                if last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise self.refuse("a range that is none")
                first = [(first[0][0], last[0][0])]
            ranges += first
            if len(ranges) > MAX_RANGES:
                raise self.refuse(f"a class of more than {MAX_RANGES} ranges")
        if not negated:
            return ranges
        return _others(ranges + self.swapped(ranges) if self.ignore_case else ranges)

    def member(self, negated: bool) -> Ranges:
        sign = self.take()
        if sign == "\\":
            return self.escape(outside=False, widest=negated)
        if sign == "[" and self.text[self.at : self.at + 1] in (":", "["):
            raise self.refuse("a class within a class")
        if sign in "&-~" and self.text[self.at : self.at + 1] == sign:
            raise self.refuse("an operation on classes")
        return [(ord(sign), ord(sign))]

    def escape(self, *, outside: bool, widest: bool = False) -> Ranges:
        sign = self.take()
        if sign in "dws":
            return [*_widest(sign)] if widest else _ASCII[sign]
        if sign in "DWS":
            return _others(_ASCII[sign.lower()] if widest else [*_widest(sign.lower())])
        if sign in "xuU":
            if self.peek("{"):
                end = self.text.find("}", self.at, self.at + 20)
                digits = self.text[self.at : end] if end >= 0 else ""
                self.at += len(digits) + 1
            else:
                digits = "".join(self.take() for _ in range({"x": 2, "u": 4, "U": 8}[sign]))
            try:
                point = int(digits, 16)
            except ValueError:
                raise self.refuse(f"the escape \\{sign}{digits}") from None
            if point > _LAST:
                raise self.refuse(f"no character {digits}")
            return [(point, point)]
        if sign in _ESCAPES:
            return [(ord(_ESCAPES[sign]),) * 2]
        if sign == "b" and not outside:
            return [(8, 8)]
        if sign.isascii() and sign.isalnum():
            raise self.refuse(f"the escape \\{sign}, which is not supported,")
        return [(ord(sign), ord(sign))]


def read_regex(pattern: str, flags: str = "", max_parts: int = MAX_PARTS) -> Expression:
    """`pattern`, matched from beginning to end. `\\d`, `\\w` and `\\s` are ASCII, and what they
    negate is what no reading counts to them. Raises `ConstraintError` for what is not regular, and
    for what is of more than `max_parts` parts."""
    return _Reader(pattern, flags, max_parts).whole()
