"""Regular expressions as expressions over bytes: characters become their UTF-8 sequences.

An expression is a tuple: `("set", mask)` one byte of a set (bit b: byte b), `("seq", parts)` a
sequence, `("alt", parts)` alternatives, `("first", parts)` any number of the first parts,
`("star", part)` repetition, `("ref", name)` a rule of a grammar, `("terminal", expression)` a
terminal of it, and `("graph", edges)` the paths from node 0 to node 1 of an automaton, whose edges
are `(node, expression, node)`.
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
#: Maximum number of copies of a bounded repetition.
MAX_COPIES = 2_000
#: Maximum number of parts of a pattern's expression with its repetitions expanded, of groups and
#: repetitions in each other, and of ranges in one class.
MAX_PARTS, MAX_DEPTH, MAX_RANGES = 160_000, 100, 10_000
#: The bytes that stand for anchors, where they are read: no UTF-8 has them.
TEXT_START, TEXT_END = 0xFE, 0xFF
_LAST_CODE_POINT = 0x10FFFF
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ASCII_CLASSES: dict[str, Ranges] = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
_UNICODE_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda item: item.isalnum() or item == "_",
    "s": str.isspace,
}


def sequence(parts: Iterable[Expression]) -> Expression:
    """The concatenation of `parts`."""
    parts = tuple(parts)
    return parts[0] if len(parts) == 1 else ("seq", parts)


def choice(parts: Iterable[Expression]) -> Expression:
    """The alternatives `parts`."""
    parts = tuple(parts)
    return parts[0] if len(parts) == 1 else ("alt", parts)


def num_copies(min_count: int, max_count: int | None) -> int:
    """The number of copies of its part that a repetition of `min_count` to `max_count` times
    contains."""
    return max(1, min_count + 1 if max_count is None else max_count)


def size(expression: Expression) -> int:
    """The number of parts of an expression, itself included. Parts shared by several places count
    at each of them, but are visited once."""
    sizes: dict[int, int] = {}

    def count_parts(expression: Expression) -> int:
        kind, parts = expression
        if kind in ("set", "ref"):
            return 1
        if id(expression) not in sizes:
            children = [*_children(expression)]
            sizes[id(expression)] = 1 + sum(map(count_parts, children))
        return sizes[id(expression)]

    return count_parts(expression)


def _children(expression: Expression) -> Iterable[Expression]:
    """The direct parts of an expression, of a terminal too."""
    kind, parts = expression
    if kind in ("star", "terminal"):
        return (parts,)
    return (inner for _, inner, _ in parts) if kind == "graph" else parts


def map_parts(expression: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """An expression with its direct parts changed. Sets, references and terminals have none."""
    kind, parts = expression
    if kind in ("set", "ref", "terminal"):
        return expression
    if kind == "star":
        return kind, change(parts)
    if kind == "graph":
        return kind, tuple((source, change(inner), to) for source, inner, to in parts)
    return kind, tuple(change(part) for part in parts)


def matches_empty(expression: Expression) -> bool:
    """Whether an expression over bytes matches the empty text."""
    kind, parts = expression
    if kind == "seq":
        return all(map(matches_empty, parts))
    if kind == "alt":
        return any(map(matches_empty, parts))
    return kind in ("star", "first")


def repeated(expression: Expression, min_count: int, max_count: int | None) -> Expression:
    """The repetition of `expression` from `min_count` to `max_count` times (None: unbounded)."""
    if max(min_count, max_count or 0) > MAX_COPIES:
        raise ConstraintError(f"a repetition of more than {MAX_COPIES} times is not supported")
    if max_count is not None and max_count < min_count:
        raise ConstraintError(
            f"a repetition from {min_count} to {max_count} times: the maximum is below the minimum"
        )
    if max_count is None:
        return sequence([*[expression] * min_count, ("star", expression)])
    return sequence([*[expression] * min_count, ("first", (expression,) * (max_count - min_count))])


def literal(text: str, ignore_case: bool = False) -> Expression:
    """The expression of `text`; with `ignore_case`, ASCII letters match in either case."""
    parts: list[Expression] = []
    for byte in text.encode("utf-8", "surrogatepass"):
        bytes_ = {byte, *(bytes([byte]).swapcase() if ignore_case and byte < 128 else b"")}
        parts.append(("set", sum(1 << item for item in bytes_)))
    return sequence(parts)


def characters(ranges: Ranges) -> Expression:
    """The expression of one character in `ranges` of code points (inclusive), as UTF-8."""
    rows: list[list[int]] = []
    for first, last in _merged(ranges):
        for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
            for edge in (0x7F, 0x7FF, 0xFFFF, _LAST_CODE_POINT):
                if low <= min(high, edge):
                    rows += _utf8(low, min(high, edge))
                    low = edge + 1
    return _tree(rows)


def _tree(rows: list[list[int]]) -> Expression:
    """The alternatives of these sequences of byte sets, with common first sets merged."""
    last = 0
    by_first: dict[int, list[list[int]]] = {}
    for row in rows:
        if len(row) == 1:
            last |= row[0]
        else:
            by_first.setdefault(row[0], []).append(row[1:])
    parts = [sequence([("set", step), _tree(rest)]) for step, rest in by_first.items()]
    return choice([("set", last), *parts] if last else parts)


def _utf8(first: int, last: int) -> list[list[int]]:
    """Sequences of byte sets for the code points `first`..`last`, whose UTF-8 has one length."""
    low, high = chr(first).encode(), chr(last).encode()

    def split(low: bytes, high: bytes) -> list[list[int]]:
        if len(low) == 1:
            return [[_span(low[0], high[0])]]
        lowest, highest = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
        if low[0] == high[0]:
            return [[1 << low[0], *rest] for rest in split(low[1:], high[1:])]
        result = []
        start, stop = low[0], high[0]
        if low[1:] != lowest:
            result += [[1 << start, *rest] for rest in split(low[1:], highest)]
            start += 1
        if high[1:] != highest:
            result += [[1 << stop, *rest] for rest in split(lowest, high[1:])]
            stop -= 1
        if start <= stop:
            result.append([_span(start, stop), *[_span(0x80, 0xBF)] * len(lowest)])
        return result

    return split(low, high)


def _span(first: int, last: int) -> int:
    return (1 << (last + 1)) - (1 << first)


def _merged(ranges: Ranges) -> Ranges:
    result: Ranges = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(last, result[-1][1])
        else:
            result.append((first, last))
    return result


def _complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for first, last in [*_merged(ranges), (_LAST_CODE_POINT + 1, _LAST_CODE_POINT + 1)]:
        if start < first:
            result.append((start, first - 1))
        start = last + 1
    return result


@cache
def _widest_class(kind: str) -> tuple[tuple[int, int], ...]:
    """Every character that the Unicode definition of a shorthand class includes."""
    is_member = _UNICODE_CLASSES[kind]
    return tuple(
        _merged([(item, item) for item in range(_LAST_CODE_POINT + 1) if is_member(chr(item))])
    )


class _Reader:
    def __init__(self, pattern: str, flags: str, max_parts: int, has_anchors: bool) -> None:
        unknown = set(flags) - set("isu")
        if unknown:
            raise ConstraintError(
                f"the flag {min(unknown)!r} of a regular expression is not supported; use i, s or u"
            )
        self.text, self.position = pattern, 0
        self.ignore_case, self.dot_all = "i" in flags, "s" in flags
        self.num_parts, self.max_parts = 0, max_parts
        self.has_anchors = has_anchors
        self.depth = 0  # of groups, at the current position
        self.height = 0  # of groups and repetitions in each other, in what was read last

    def accept(self, text: str) -> bool:
        if self.text.startswith(text, self.position):
            self.position += len(text)
            return True
        return False

    def next_character(self) -> str:
        if self.position >= len(self.text):
            raise self.error("an unexpected end")
        self.position += 1
        return self.text[self.position - 1]

    def error(self, what: str) -> ConstraintError:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return ConstraintError(f"{what} in the regular expression {shown!r}")

    def count(self, parts: int) -> None:
        self.num_parts += parts
        if self.num_parts > self.max_parts:
            raise self.error(
                f"more than {self.max_parts} parts with repetitions expanded (make them smaller),"
            )

    def parse(self) -> Expression:
        result = self.alternatives()
        if self.position < len(self.text):
            raise self.error(f"an unexpected {self.text[self.position]!r}")
        return result

    def alternatives(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} nested groups")
        parts = [self.concatenation()]
        height = self.height
        while self.accept("|"):
            parts.append(self.concatenation())
            height = max(height, self.height)
        self.depth -= 1
        self.height = height
        self.nest()
        return choice(parts)

    def nest(self) -> None:
        """Count a group or repetition around what was read last."""
        self.height += 1
        if self.height > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} nested groups and repetitions")

    def concatenation(self) -> Expression:
        parts: list[Expression] = []
        height = 0
        self.count(1)
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            before = self.num_parts
            self.height = 0
            expression = self.atom()
            while (bounds := self.bounds()) is not None:
                self.count((self.num_parts - before) * (num_copies(*bounds) - 1))
                expression = repeated(expression, *bounds)
                self.nest()
                self.accept("?")  # a lazy repetition matches the same texts
            parts.append(expression)
            height = max(height, self.height)
        self.height = height
        return sequence(parts)

    def bounds(self) -> tuple[int, int | None] | None:
        for character, min_count, max_count in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.accept(character):
                return min_count, max_count
        if not self.accept("{"):
            return None
        end = self.text.find("}", self.position, self.position + 20)
        content = self.text[self.position : end] if end >= 0 else ""
        first, comma, second = (item.strip() for item in content.partition(","))
        numbers = [item for item in (first, second) if item]
        if not numbers or not all(n.isascii() and n.isdigit() for n in numbers):
            raise self.error("a '{' that is not a repetition")
        self.position += len(content) + 1
        min_count = int(first or 0)
        return min_count, min_count if not comma else int(second) if second else None

    def atom(self) -> Expression:
        character = self.next_character()
        if character == "(":
            if self.accept("?"):
                self.group()
            result = self.alternatives()
            if self.next_character() != ")":
                raise self.error("a group that is not closed")
            return result
        if character == "[":
            return self.one_of(self.set())
        if character == ".":
            return self.one_of([(0, _LAST_CODE_POINT)] if self.dot_all else _complement([(10, 10)]))
        if character == "\\":
            return self.one_of(self.escape(outside=True))
        if character in "^$":
            if self.has_anchors:
                return "set", 1 << (TEXT_START if character == "^" else TEXT_END)
            raise self.error(f"an anchor ({character})")
        if character in "*+?{":
            raise self.error(f"nothing to repeat before {character!r}")
        return self.one_of([(ord(character), ord(character))])

    def group(self) -> None:
        if self.accept(":"):
            return
        named = self.accept("P<") or self.accept("<")
        if not named or self.text[self.position : self.position + 1] in ("=", "!", ""):
            raise self.error("look-around or flags, which are not supported,")
        while self.next_character() != ">":
            pass

    def one_of(self, ranges: Ranges) -> Expression:
        if self.ignore_case:
            ranges = ranges + self.swapped(ranges)
        result = characters(ranges)
        self.count(size(result))
        return result

    @staticmethod
    def swapped(ranges: Ranges) -> Ranges:
        """The ASCII letters of `ranges` in the opposite case."""
        result = []
        for first, last in ranges:
            for start, stop, shift in ((65, 90, 32), (97, 122, -32)):
                low, high = max(first, start), min(last, stop)
                if low <= high:
                    result.append((low + shift, high + shift))
        return result

    def set(self) -> Ranges:
        negated = self.accept("^")
        ranges: Ranges = []
        start = self.position
        while self.position == start or not self.accept("]"):  # a leading "]" is literal
            first = self.member(negated)
            lookahead = self.text[self.position : self.position + 2]
            if len(lookahead) == 2 and lookahead[0] == "-" and lookahead[1] != "]":
                self.position += 1
                last = self.member(negated)
                if not (len(first) == len(last) == 1 and first[0][0] == first[0][1]):
                    raise self.error("a range of classes")
                if last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise self.error("a range whose end is before its start")
                first = [(first[0][0], last[0][0])]
            ranges += first
            if len(ranges) > MAX_RANGES:
                raise self.error(f"a class of more than {MAX_RANGES} ranges")
        if not negated:
            return ranges
        return _complement(ranges + self.swapped(ranges) if self.ignore_case else ranges)

    def member(self, negated: bool) -> Ranges:
        character = self.next_character()
        if character == "\\":
            return self.escape(outside=False, widest=negated)
        if character == "[" and self.text[self.position : self.position + 1] in (":", "["):
            raise self.error("a class within a class")
        if character in "&-~" and self.text[self.position : self.position + 1] == character:
            raise self.error("an operation on classes")
        return [(ord(character), ord(character))]

    def escape(self, *, outside: bool, widest: bool = False) -> Ranges:
        character = self.next_character()
        if character in "dws":
            return [*_widest_class(character)] if widest else _ASCII_CLASSES[character]
        if character in "DWS":
            return _complement(
                _ASCII_CLASSES[character.lower()] if widest else [*_widest_class(character.lower())]
            )
        if character in "xuU":
            if self.accept("{"):
                end = self.text.find("}", self.position, self.position + 20)
                digits = self.text[self.position : end] if end >= 0 else ""
                self.position += len(digits) + 1
            else:
                digits = "".join(
                    self.next_character() for _ in range({"x": 2, "u": 4, "U": 8}[character])
                )
            try:
                point = int(digits, 16)
            except ValueError:
                raise self.error(f"the escape \\{character}{digits}") from None
            if point > _LAST_CODE_POINT:
                raise self.error(f"no character {digits}")
            return [(point, point)]
        if character in _ESCAPES:
            return [(ord(_ESCAPES[character]),) * 2]
        if character == "b" and not outside:
            return [(8, 8)]
        if character.isascii() and character.isalnum():
            raise self.error(f"the escape \\{character}, which is not supported,")
        return [(ord(character), ord(character))]


def read_regex(
    pattern: str, flags: str = "", max_parts: int = MAX_PARTS, *, has_anchors: bool = False
) -> Expression:
    """Parses a regular expression that matches whole texts.

    `\\d`, `\\w` and `\\s` are ASCII classes. Their negations exclude the Unicode classes.

    Args:
        pattern: The regular expression.
        flags: Any of "i" (ignore case, ASCII), "s" (a dot matches line breaks) and "u" (no effect).
        max_parts: Maximum number of parts with repetitions expanded.
        has_anchors: Whether the anchors ^ and $ are read, as the bytes `TEXT_START` and `TEXT_END`;
            otherwise they are refused.

    Raises:
        ConstraintError: The pattern is not regular or not supported, or it has more than
            `max_parts` parts.
    """
    return _Reader(pattern, flags, max_parts, has_anchors).parse()
