"""The shortest end that makes a text whole."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.completion_hints import Hints
from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.vocabulary import vocabulary
from anydecode.models.tokenizer import Tokenizer

#: Bytes in the order in which they lead to an end, outside of strings.
_ENDS = b'}]":,0entflu{[1'
#: Bytes that a step away from the likeliest one counts as: such steps are the last resort.
_DETOUR = 1000
#: The same for one of several ways out of a stretch where nothing changes, such as digits.
_WAY_OUT = 16
#: Places with a choice, and places in all, that are looked at before the search gives up.
_MOST_CHOICES = 600
_MOST_MASKS = 6000
#: Choices followed from one place, and values among them that the schema tells of.
_MOST_WAYS = 5
_MOST_VALUES = 2
#: More printable characters than so many are allowed only inside strings.
_FEW = 32


def shortest_completion(
    state: ConstraintState, tokenizer: Tokenizer, hints: Hints | None = None
) -> list[int] | None:
    """Tokens, the last an end-of-text token, that make the text whole; None where none are found.
    Best first: short, and what closes something; then said with as few tokens as will do."""
    known = _vocabulary(tokenizer)
    said = _Search(state, known, hints).run()
    if said is None:
        return None
    fewer = known.fewest(b"".join(map(known.piece, said)))
    if len(fewer) < len(said) and state.follows(fewer):
        said = fewer
    ahead = state.fork()
    for token in said:
        ahead.advance(token)
    mask = ahead.mask()
    return [*said, next(end for end in known.ends if mask is None or mask[end])]


class _Step(NamedTuple):
    """Tokens, where they lead, what was allowed before the last of them (None where it was not a
    step by itself), and how many of the last ones changed nothing in what is allowed."""

    said: list[int]
    state: ConstraintState
    mask: np.ndarray | None
    stalled: int


class _Search:
    """One search, byte by byte where the vocabulary has the bytes."""

    def __init__(self, state: ConstraintState, known: _Vocabulary, hints: Hints | None) -> None:
        self._known = known
        self._hints = hints
        self._masks = 0
        self._order = 0
        self._queue: list[tuple[int, int, _Step]] = [(0, 0, _Step([], state.fork(), None, 0))]

    def run(self) -> list[int] | None:
        """Tokens up to where the text may stop."""
        for _ in range(_MOST_CHOICES):
            if not self._queue or self._masks > _MOST_MASKS:
                return None
            cost, _, step = heappop(self._queue)
            mask = self._follow(step)
            if self._may_stop(step.state, mask):
                return step.said
            if mask is None:
                return None
            same = step.mask is not None and np.array_equal(mask, step.mask)
            stalled = step.stalled + 1 if same else 0
            for extra, tokens in self._ways(step.state, mask, stalled):
                ahead = step.state.fork()
                for token in tokens:
                    ahead.advance(token)
                self._order -= 1  # of equals the latest, so that one path is followed down
                before = mask if len(tokens) == 1 else None
                following = _Step([*step.said, *tokens], ahead, before, stalled)
                heappush(self._queue, (cost + len(tokens) + extra, self._order, following))
        return None

    def _may_stop(self, state: ConstraintState, mask: np.ndarray | None) -> bool:
        return state.may_stop and any(mask is None or mask[end] for end in self._known.ends)

    def _follow(self, step: _Step) -> np.ndarray | None:
        """Go on as long as one thing must follow; what may follow then."""
        while True:
            mask = step.state.mask()
            self._masks += 1
            if mask is None or self._may_stop(step.state, mask):
                return mask
            only = np.flatnonzero(mask)
            if len(only) > 1:
                only = self._known.single[mask[self._known.single]]
            if len(only) != 1 or self._masks > _MOST_MASKS:
                return mask
            step.state.advance(int(only[0]))
            step.said.append(int(only[0]))

    def _ways(
        self, state: ConstraintState, mask: np.ndarray, stalled: int
    ) -> list[tuple[int, list[int]]]:
        """Tokens to go on with, and what they count as beside their number."""
        known = self._known
        plain = [[token] for token in _candidates(mask, known)]
        in_string = known.in_string(mask)
        ends = (b'"',) if in_string else (b"}", b"]", b",")
        closers = [one for one in plain if known.piece(one[0]) in ends]
        if not closers and self._hints is not None:
            plain = self._hinted(state, in_string) + plain
        ways = [(_DETOUR * i, one) for i, one in enumerate(plain[:_MOST_WAYS])]
        if stalled and not stalled & (stalled - 1):  # the first, second, fourth, eighth ... time
            ways = [(extra + _WAY_OUT, one) for extra, one in ways]
            others = _ways_out(state, mask, known)
            ways += [(_WAY_OUT * i, [one]) for i, one in enumerate(others)]
        return ways

    def _hinted(self, state: ConstraintState, in_string: bool) -> list[list[int]]:
        """Values that may stand here or, where a string is open, its rest; or else names."""
        assert self._hints is not None
        found: list[list[int]] = []
        for value in self._hints.values:
            texts = [] if in_string else [value]
            if value[:1] == b'"':
                texts.append(value[1:])
            for text in texts:
                tokens = self._known.bytewise(text)
                if tokens and self._ends_value(state, tokens):
                    found.append(tokens)
            if len(found) >= _MOST_VALUES:
                return found
        return found or ([] if in_string else self._names(state))

    def _ends_value(self, state: ConstraintState, tokens: list[int]) -> bool:
        """Whether `tokens` may follow, and behind them what closes or follows a value."""
        if not state.follows(tokens):
            return False
        if any(state.follows([*tokens, *self._known.bytewise(one)]) for one in (b",", b"}", b"]")):
            return True
        ahead = state.fork()
        for token in tokens:
            ahead.advance(token)
        return ahead.may_stop

    def _names(self, state: ConstraintState) -> list[list[int]]:
        """Names that may stand here, with what is left of their quotes and a colon."""
        assert self._hints is not None
        opened = not state.follows(self._known.bytewise(b'"'))
        allowed: dict[str, list[int]] = {}
        for name, text in self._hints.names.items():
            tokens = self._known.bytewise(text[1:] if opened else text)
            if tokens and state.follows(tokens):
                allowed[name] = tokens
        return [allowed[name] for name in self._hints.ordered(allowed.keys())] if allowed else []


def _ways_out(state: ConstraintState, mask: np.ndarray, known: _Vocabulary) -> list[int]:
    """The few printable characters that change what is allowed, as the "." behind digits does."""
    found = []
    for token in known.plain[mask[known.plain]].tolist():
        ahead = state.fork()
        ahead.advance(token)
        after = ahead.mask()
        if after is None or not np.array_equal(after, mask):
            found.append((_rank(known.piece(token)), token))
    return [token for _, token in sorted(found)[:4]]


def _candidates(mask: np.ndarray, known: _Vocabulary) -> list[int]:
    """The few tokens that `mask` allows which are most likely to lead to an end, of one byte where
    there are such."""
    if known.in_string(mask):  # what closes it comes first
        quotes = [token for token in known.quotes if mask[token]]
        if quotes:
            return quotes
    allowed = known.single[mask[known.single]]
    if not len(allowed):
        allowed = np.flatnonzero(mask)
    pieces = [(known.piece(int(token)), int(token)) for token in allowed]
    ranked = sorted((_rank(piece), token) for piece, token in pieces if piece)
    return [token for _, token in ranked[:4]]


class _Vocabulary:
    """A tokenizer's tokens by their bytes; among them those of one byte, those that close a
    string, and the printable ones that stand for themselves in one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._own = vocabulary(tokenizer, tokenizer.vocab_size)
        self.piece = self._own.pieces.__getitem__
        self.ends = sorted(tokenizer.eos_ids)
        sizes = list(enumerate(self._own.pieces))
        self._tokens = {piece: token for token, piece in reversed(sizes) if piece}
        self.single = np.array([token for token, piece in sizes if len(piece) == 1], np.int64)
        marks = {bytes([byte]) for byte in range(32, 127)} - {b'"', b"\\"}
        self.plain = np.array([token for token, piece in sizes if piece in marks], np.int64)
        self.quotes = [token for token, piece in sizes if piece == b'"']
        self.bytewise = lru_cache(1 << 12)(self._bytewise)

    def in_string(self, mask: np.ndarray) -> bool:
        """Whether what is allowed is the inside of a string."""
        return int(np.count_nonzero(mask[self.plain])) > _FEW

    def _bytewise(self, text: bytes) -> list[int]:
        """One token per byte; empty where some byte has none."""
        tokens = [self._tokens.get(text[i : i + 1], -1) for i in range(len(text))]
        return [] if -1 in tokens else tokens

    def fewest(self, text: bytes) -> list[int]:
        """The fewest tokens that spell `text`; of equals those with the longest last."""
        none = (len(text) + 1, 0, -1)
        best = [(0, 0, -1), *[none] * len(text)]  # tokens, start of the last, the last
        for start in range(len(text)):
            count = best[start][0] + 1
            for stop in range(start + 1, len(text) + 1):
                piece = text[start:stop]
                token = self._tokens.get(piece)
                if token is not None and count < best[stop][0]:
                    best[stop] = (count, start, token)
                if not self._own.goes_on(piece):
                    break
        tokens, at = [], len(text)
        while at:
            _, at, token = best[at]
            tokens.append(token)
        return tokens[::-1]


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]


def _rank(piece: bytes) -> tuple[int, int]:
    first = _ENDS.find(piece[:1])
    return (len(_ENDS) if first < 0 else first, len(piece))
