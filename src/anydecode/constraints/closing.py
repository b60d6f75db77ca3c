"""The shortest end that makes a text whole."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.constraint import ConstraintState
from anydecode.models.tokenizer import Tokenizer

#: Bytes in the order in which they lead to an end, outside of strings.
_ENDS = b'}]":,0entflu{[1'
#: Tokens that a step away from the likeliest one counts as: such steps are the last resort.
_DETOUR = 1000
#: The same for one of several ways out of a stretch where nothing changes, such as digits.
_WAY_OUT = 16
#: States looked at before the search gives up.
_MOST_STATES = 600


def closing_tokens(state: ConstraintState, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens, the last an end-of-text token, that make the text whole; None where none are found.
    Best first: few tokens, and those that close something."""
    ends = sorted(tokenizer.eos_ids)
    start = _Step([], state, None, 0)
    queue: list[tuple[int, int, _Step]] = [(0, 0, start)]
    order = 0
    for _ in range(_MOST_STATES):
        if not queue:
            return None
        cost, _, step = heappop(queue)
        here, mask = step.state, step.state.mask()
        if here.may_stop:
            end = next((token for token in ends if mask is None or mask[token]), None)
            if end is not None:
                return [*step.said, end]
        if mask is None:
            return None
        same = step.mask is not None and np.array_equal(mask, step.mask)
        stalled = step.stalled + 1 if same else 0
        further = [(_DETOUR * i, one) for i, one in enumerate(_candidates(mask, tokenizer))]
        if stalled and not stalled & (stalled - 1):  # the first, second, fourth, eighth ... time
            further = [(extra + _WAY_OUT, one) for extra, one in further]
            ways = _ways_out(here, mask, tokenizer)
            further += [(_WAY_OUT * i, one) for i, one in enumerate(ways)]
        for extra, token in further:
            ahead = here.fork()
            ahead.advance(token)
            order -= 1  # of equals the latest, so that one path is followed down
            following = _Step([*step.said, token], ahead, mask, stalled)
            heappush(queue, (cost + 1 + extra, order, following))
    return None


class _Step(NamedTuple):
    """Tokens, where they lead, what was allowed before the last of them, and how many of the last
    ones changed nothing in what is allowed."""

    said: list[int]
    state: ConstraintState
    mask: np.ndarray | None
    stalled: int


def _ways_out(state: ConstraintState, mask: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """The few printable characters that change what is allowed, as the "." behind digits does."""
    known = _vocabulary(tokenizer)
    found = []
    for token in known.plain[mask[known.plain]].tolist():
        ahead = state.fork()
        ahead.advance(token)
        after = ahead.mask()
        if after is None or not np.array_equal(after, mask):
            found.append((_rank(known.piece(token)), token))
    return [token for _, token in sorted(found)[:4]]


def _candidates(mask: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """The few tokens that `mask` allows which are most likely to lead to an end."""
    allowed = np.flatnonzero(mask)
    known = _vocabulary(tokenizer)
    if len(allowed) > 64:  # inside a string: what closes it comes first
        quotes = [token for token in known.quotes if mask[token]]
        if quotes:
            return quotes
        allowed = known.single[mask[known.single]]
    pieces = [(known.piece(int(token)), int(token)) for token in allowed]
    longest, last = max(pieces, key=lambda pair: len(pair[0]), default=(b"", -1))
    if longest and all(piece and longest.startswith(piece) for piece, _ in pieces):
        return [last]  # one text must follow
    ranked = sorted((_rank(piece), token) for piece, token in pieces if piece)
    return [token for _, token in ranked[:4]]


class _Vocabulary:
    """A tokenizer's tokens of one byte, among them those that close a string, and the printable
    ones that stand for themselves in one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.piece = lru_cache(1 << 14)(tokenizer.token_bytes)
        sizes = [(token, tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        self.single = np.array([token for token, piece in sizes if len(piece) == 1], np.int64)
        marks = {bytes([byte]) for byte in range(32, 127)} - {b'"', b"\\"}
        self.plain = np.array([token for token, piece in sizes if piece in marks], np.int64)
        self.quotes = [token for token, piece in sizes if piece == b'"']


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]


def _rank(piece: bytes) -> tuple[int, int]:
    first = _ENDS.find(piece[:1])
    return (len(_ENDS) if first < 0 else first, len(piece))
