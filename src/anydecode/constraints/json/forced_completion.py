"""Forced completion: an answer is completed before the token limit cuts it off.

The text is free until the shortest completion only just fits within the limit. From there on, the
sampler checks each token that it samples (`fits`) and takes another one if no completion fits
behind it, so a text that ends within the limit is never shortened. The mask allows the tokens of
the completion only, for decoders that need the whole distribution. Free-form objects, unbounded
arrays, recursion and unbounded numbers finish this way. Every token-exact decoder generates the
same tokens, and streaming does not change.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anydecode.constraints.constraint import CompletionHints, Constraint, ConstraintState
from anydecode.constraints.json.shortest_completion import (
    max_work,
    search_completion,
    shortest_completion,
)
from anydecode.models.tokenizer import Tokenizer

#: One over the share of the limit that is generated before the first search for a completion. Most
#: answers are shorter.
_FIRST_SEARCH_SHARE = 8
#: Maximum slack, in tokens: a token of the answer may lengthen the shortest completion by so many
#: without exceeding the limit. The slack is also bounded by the share of the limit above.
_MAX_SLACK = 16
#: A search behind a token that is tried has half the work after so many tokens of the completion:
#: the work of all of them is bounded by some times that of one search, and there is less to find.
_TAKEN_PER_HALF = 8


class _Search(NamedTuple):
    """The result of a search after `num_tokens` tokens: the completion to force from there on
    (empty if none), the number of tokens after which to search again, and the work of this search
    and all before it in the same try."""

    num_tokens: int
    completion: tuple[int, ...]
    next_search: int
    work: int = 0


class CompletedConstraint(Constraint):
    """A constraint whose answers are completed before the token limit, if it is to `finish`."""

    finish: bool

    @property
    @abstractmethod
    def completion_hints(self) -> CompletionHints:
        """Names and values for shortest completions. Available after `start`."""

    def with_limit(
        self, state: ConstraintState, tokenizer: Tokenizer, vocab_size: int, max_tokens: int
    ) -> ConstraintState:
        if not self.finish:
            return state
        return ForcedCompletion.of(state, tokenizer, vocab_size, max_tokens, self.completion_hints)


class ForcedCompletion(ConstraintState):
    """The state `inner`, with a forced completion within `max_tokens` tokens if one is found that
    fits."""

    def __init__(
        self,
        inner: ConstraintState,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_tokens: int,
        hints: CompletionHints,
    ) -> None:
        self.inner = inner
        self.origin = None if inner.origin is None else (inner.origin, max_tokens)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._hints = hints
        self._slack = min(_MAX_SLACK, max_tokens // _FIRST_SEARCH_SHARE)
        self._tokens: list[int] = []
        self._num_tries = 0
        self._searches: tuple[_Search, ...] = (_Search(0, (), max_tokens // _FIRST_SEARCH_SHARE),)

    @classmethod
    def of(
        cls,
        inner: ConstraintState,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_tokens: int,
        hints: CompletionHints,
    ) -> ForcedCompletion:
        """Returns the state before the first token. If even the shortest text takes much of the
        limit, the first search happens at once."""
        state = cls(inner, tokenizer, vocab_size, max_tokens, hints)
        if tokenizer not in hints.shortest:
            shortest_found = shortest_completion(inner, tokenizer, hints)
            hints.shortest[tokenizer] = array("i", shortest_found or ())
        shortest = hints.shortest[tokenizer]
        num_spare = (max_tokens - len(shortest)) // 2
        if shortest and max_tokens // _FIRST_SEARCH_SHARE + state._slack > num_spare:
            state._searches = (_Search(0, (), 0),)
            state._search(shortest.tolist())
        return state

    @property
    def is_forced(self) -> bool:
        """Whether the text so far contains tokens of a forced completion."""
        return any(
            search.completion[:1] == tuple(self._tokens[search.num_tokens : search.num_tokens + 1])
            for search in self._searches
            if search.completion
        )

    @property
    def is_completing(self) -> bool:
        return bool(self._remaining())

    @property
    def unforced(self) -> ConstraintState:
        return self.inner

    def fits(self, token: int, num_tried: int = 0) -> bool:
        completion = list(self._remaining())
        if not completion or token == completion[0] or token in self._tokenizer.eos_ids:
            return True
        state = self.inner.fork()
        state.advance(token)
        num_left = self._max_tokens - self._num_tokens - 1
        if _is_free_text(state) or (len(completion) <= num_left and is_end(state, completion)):
            return True
        search = self._searches[-1]
        num_taken = self._num_tokens - search.num_tokens  # of the completion
        work = max_work(self._num_tries, search.work) >> num_tried + num_taken // _TAKEN_PER_HALF
        found, _ = search_completion(state, self._tokenizer, self._hints, work)
        return found is not None and len(found) <= num_left

    def limit_searches(self, num_tries: int) -> None:
        self._num_tries = num_tries

    def with_banned(self, banned: Sequence[int]) -> ForcedCompletion:
        other = self._with(self.inner.with_banned(banned))
        if other._remaining():
            other._search()
        return other

    def mask(self) -> np.ndarray | None:
        completion = self._remaining()
        if not completion:
            return self.inner.mask()
        mask = np.zeros(self._vocab_size, bool)
        mask[completion[0]] = True
        return mask

    def allows(self, token: int) -> bool:
        completion = self._remaining()
        return token == completion[0] if completion else self.inner.allows(token)

    def advance(self, token: int) -> None:
        completion = self._remaining()
        self.inner.advance(token)
        self._tokens.append(token)
        if token in self._tokenizer.eos_ids:
            return
        if completion:
            if token != completion[0]:
                free = _Search(self._num_tokens, (), self._num_tokens, self._searches[-1].work)
                self._searches = (*self._searches, free)
                is_short = len(completion) <= self._max_tokens - self._num_tokens
                self._search(list(completion) if is_short else None)
        elif self._num_tokens >= self._searches[-1].next_search or self._ends_late():
            self._search()

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        del self._tokens[len(self._tokens) - count :]
        self._searches = tuple(
            search for search in self._searches if search.num_tokens <= self._num_tokens
        )

    def fork(self) -> ForcedCompletion:
        return self._with(self.inner.fork())

    def forced_tokens(self) -> list[int]:
        return self.inner.forced_tokens()

    @property
    def can_stop(self) -> bool:
        return self.inner.can_stop

    @property
    def finished(self) -> bool:
        return self.inner.finished

    def prepare(self) -> None:
        if not self._remaining():
            self.inner.prepare()

    def _with(self, inner: ConstraintState) -> ForcedCompletion:
        other = ForcedCompletion(
            inner, self._tokenizer, self._vocab_size, self._max_tokens, self._hints
        )
        other._tokens, other._searches = self._tokens.copy(), self._searches
        other._num_tries = self._num_tries
        return other

    @property
    def _num_tokens(self) -> int:
        return len(self._tokens)

    def _remaining(self) -> tuple[int, ...]:
        """The tokens left of the forced completion; empty while the text is free."""
        search = self._searches[-1]
        return search.completion[self._num_tokens - search.num_tokens :]

    def _ends_late(self) -> bool:
        """Whether the text may end here, and there is hardly room for another part like it, such
        as another call."""
        num_left = self._max_tokens - self._num_tokens
        return (
            num_left <= self._shortest_length() + self._slack + self._slack // 2
            and self.inner.can_stop
        )

    def _shortest_length(self) -> int:
        """The number of tokens of the shortest complete text; 0 if it is not known."""
        return len(self._hints.shortest.get(self._tokenizer) or ())

    def _search(self, known: list[int] | None = None) -> None:
        """Searches for the shortest completion, unless `known` is one. A token usually lengthens
        it by one, so half of the spare tokens can be generated before the next search. Free text
        is complete after every character, so nothing is forced in it."""
        if _is_free_text(self.inner):
            return
        num_left = self._max_tokens - self._num_tokens
        work = self._searches[-1].work if self._searches else 0
        if not self.inner.can_stop and not self._hints.may_force(self._text()):
            num_free = max(1, (num_left // 2 - self._slack) // 2)
            search = _Search(self._num_tokens, (), self._num_tokens + num_free, work)
            self._searches = (*self._searches, search)
            return
        shortest_found = known
        if known is None or not is_end(self.inner, known):
            shortest_found, spent = search_completion(
                self.inner, self._tokenizer, self._hints, max_work(self._num_tries, work)
            )
            work += spent
        num_needed = None if shortest_found is None else len(shortest_found)
        if num_needed is not None and self.inner.can_stop:
            # The answer may also go on, for example with another call.
            num_needed = max(num_needed, self._shortest_length())
        num_spare = num_left // 2 if num_needed is None else num_left - num_needed
        completion: tuple[int, ...] = ()
        is_late = num_spare <= self._slack + self._slack // 2
        if shortest_found is not None and len(shortest_found) <= num_left and is_late:
            end = self.inner.fork()
            for token in shortest_found[:-1]:
                end.advance(token)
            if _is_free_text(end):  # within a character of free text
                return
            completion = tuple(shortest_found)  # earlier than necessary: avoids a search per token
        num_free = max(1, (num_spare - self._slack) // 2)
        if shortest_found is not None and len(shortest_found) > num_left + _MAX_SLACK:
            num_free = self._max_tokens + 1  # a token shortens it by one: it will not fit later
        self._searches = (
            *self._searches,
            _Search(self._num_tokens, completion, self._num_tokens + num_free, work),
        )

    def _text(self) -> str:
        """The text so far."""
        parts = (self._tokenizer.token_bytes(token) for token in self._tokens)
        return b"".join(parts).decode("utf-8", "replace")


def is_end(state: ConstraintState, tokens: list[int]) -> bool:
    """Whether the text may go on with `tokens`, which end it. The shortest text of a constraint
    need not be one of its narrowed forms."""
    *text, end = tokens
    if not state.allows_sequence(text):
        return False
    branch = state.fork()
    for token in text:
        branch.advance(token)
    return branch.can_stop and branch.allows(end)


def _is_free_text(state: ConstraintState) -> bool:
    """Whether the text may end here, and more than half of the tokens may follow."""
    if not state.can_stop:
        return False
    mask = state.mask()
    return mask is None or 2 * int(np.count_nonzero(mask)) > len(mask)
