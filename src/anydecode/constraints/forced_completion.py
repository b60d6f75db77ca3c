"""An answer brought to its end before the token limit cuts it off.

Free-form objects, arrays without a bound, recursion and endless digits all finish this way, and
nothing is forbidden before it has to be: from the place where the shortest end only just fits, the
text goes that way. It is a matter of masks, so every decoder says the same and streams as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anydecode.constraints.completion_hints import Hints
from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.shortest_completion import shortest_completion
from anydecode.models.tokenizer import Tokenizer

#: The share of the limit that passes before the end is first looked for: most answers are shorter.
_FIRST = 8
#: Tokens that one token of the answer may add to the way to its end without cutting it off: at
#: most so many, and no larger a share of the limit than the one above.
_SPARE = 16


class _Look(NamedTuple):
    """What was found behind `said` tokens: the end to take from there on, or none, and then behind
    how many tokens to look again."""

    said: int
    end: tuple[int, ...]
    again: int


class ForcedCompletion(ConstraintState):
    """`inner`, ended within `limit` tokens where a way to the end is found that is as short."""

    def __init__(
        self,
        inner: ConstraintState,
        tokenizer: Tokenizer,
        vocab_size: int,
        limit: int,
        hints: Hints,
    ) -> None:
        self.inner = inner
        self.origin = None if inner.origin is None else (inner.origin, limit)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limit = limit
        self._hints = hints
        self._spare = min(_SPARE, limit // _FIRST)
        self._said = 0
        self._looks: tuple[_Look, ...] = (_Look(0, (), limit // _FIRST),)

    @classmethod
    def of(
        cls,
        inner: ConstraintState,
        tokenizer: Tokenizer,
        vocab_size: int,
        limit: int,
        hints: Hints,
    ) -> ForcedCompletion:
        """The start of a text. Where even the shortest one takes much of the limit, the end is
        looked for sooner."""
        state = cls(inner, tokenizer, vocab_size, limit, hints)
        if tokenizer not in hints.shortest:
            found = shortest_completion(inner, tokenizer, hints)
            hints.shortest[tokenizer] = None if found is None else len(found)
        shortest = hints.shortest[tokenizer]
        if shortest is not None and limit // _FIRST + state._spare > (limit - shortest) // 2:
            state._looks = ()
            state._look()
        return state

    @property
    def steered(self) -> bool:
        """Whether the text so far has taken the short way to its end."""
        return any(look.end and look.said < self._said for look in self._looks)

    @property
    def wider(self) -> ConstraintState:
        return self.inner

    def without(self, banned: Sequence[int]) -> ForcedCompletion:
        other = self._with(self.inner.without(banned))
        if other._end():
            other._look()
        return other

    def mask(self) -> np.ndarray | None:
        end = self._end()
        if not end:
            return self.inner.mask()
        only = np.zeros(self._vocab_size, bool)
        only[end[0]] = True
        return only

    def allows(self, token: int) -> bool:
        end = self._end()
        return token == end[0] if end else self.inner.allows(token)

    def advance(self, token: int) -> None:
        end = self._end()
        self.inner.advance(token)
        self._said += 1
        if token in self._tokenizer.eos_ids:
            return
        if token != end[0] if end else self._said == self._looks[-1].again:
            self._look()

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        self._said -= count
        self._looks = tuple(look for look in self._looks if look.said <= self._said)

    def fork(self) -> ForcedCompletion:
        return self._with(self.inner.fork())

    def forced(self) -> list[int]:
        end = self._end()
        return list(end[:-1] or end) if end else self.inner.forced()

    @property
    def may_stop(self) -> bool:
        return self.inner.may_stop

    @property
    def finished(self) -> bool:
        return self.inner.finished

    def prepare(self) -> None:
        if not self._end():
            self.inner.prepare()

    def _with(self, inner: ConstraintState) -> ForcedCompletion:
        other = ForcedCompletion(inner, self._tokenizer, self._vocab_size, self._limit, self._hints)
        other._said, other._looks = self._said, self._looks
        return other

    def _end(self) -> tuple[int, ...]:
        """What is left of the end that is being taken; empty where the text is free."""
        look = self._looks[-1]
        return look.end[self._said - look.said :]

    def _look(self) -> None:
        """Look for the shortest end. A token makes it longer by one, as a rule: half of the room is
        free before another look is needed."""
        left = self._limit - self._said
        found = shortest_completion(self.inner, self._tokenizer, self._hints)
        room = left // 2 if found is None else left - len(found)
        end: tuple[int, ...] = ()
        if found is not None and 0 <= room <= self._spare + self._spare // 2:
            end = tuple(found)  # sooner than need be: not to look again behind every token
        free = max(1, (room - self._spare) // 2)
        self._looks = (*self._looks, _Look(self._said, end, self._said + free))
