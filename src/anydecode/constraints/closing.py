"""The shortest end that makes a text whole."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.constraint import ConstraintState
from anydecode.models.tokenizer import Tokenizer

#: Bytes in the order in which they lead to an end, outside of strings.
_ENDS = b'}]":,0entflu{[1'
#: Tokens that a step away from the likeliest one counts as: such steps are the last resort.
_DETOUR = 1000
#: States looked at before the search gives up.
_MOST_STATES = 400


def closing_tokens(state: ConstraintState, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens, the last an end-of-text token, that make the text whole; None where none are found.
    Best first: few tokens, and those that close something."""
    ends = sorted(tokenizer.eos_ids)
    queue: list[tuple[int, int, list[int], ConstraintState]] = [(0, 0, [], state)]
    order = 0
    for _ in range(_MOST_STATES):
        if not queue:
            return None
        cost, _, said, here = heappop(queue)
        if here.may_stop:
            mask = here.mask()
            end = next((token for token in ends if mask is None or mask[token]), None)
            if end is not None:
                return [*said, end]
        for rank, token in enumerate(_candidates(here, tokenizer)):
            ahead = here.fork()
            ahead.advance(token)
            order -= 1  # of equals the latest, so that one path is followed down
            heappush(queue, (cost + 1 + _DETOUR * rank, order, [*said, token], ahead))
    return None


def _candidates(state: ConstraintState, tokenizer: Tokenizer) -> list[int]:
    """The few allowed tokens most likely to lead to an end."""
    mask = state.mask()
    if mask is None:
        return []
    allowed = np.flatnonzero(mask)
    known = _vocabulary(tokenizer)
    if len(allowed) > 64:  # inside a string: what closes it comes first
        quotes = [token for token in known.quotes if mask[token]]
        if quotes:
            return quotes
        allowed = known.single[mask[known.single]]
    pieces = [(known.piece(int(token)), int(token)) for token in allowed]
    ranked = sorted((_rank(piece), token) for piece, token in pieces if piece)
    return [token for _, token in ranked[:4]]


class _Vocabulary:
    """A tokenizer's tokens of one byte, and among them those that close a string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.piece = lru_cache(1 << 14)(tokenizer.token_bytes)
        sizes = [(token, tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        self.single = np.array([token for token, piece in sizes if len(piece) == 1], np.int64)
        self.quotes = [token for token, piece in sizes if piece == b'"']


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]


def _rank(piece: bytes) -> tuple[int, int]:
    first = _ENDS.find(piece[:1])
    return (len(_ENDS) if first < 0 else first, len(piece))
