"""A constraint that applies behind the reasoning of a model: whatever stands between the tags is
free, and what follows the closing tag meets the constraint."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.completion_hints import Hints
from anydecode.constraints.constraint import (
    Constraint,
    ConstraintState,
    IncrementalValidator,
    Report,
)
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Line breaks that may stand between the closing tag and the answer, part of neither.
MAX_LINE_BREAKS = 2
_START, _REASONING, _CLOSED = range(3)


@dataclass(frozen=True)
class AfterReasoning(Constraint):
    """`constraint` for what follows the reasoning. `opened`: the prompt ends with the opening tag.
    Otherwise the answer may begin with that tag, and meets the constraint at once where it does
    not. No end-of-text token can stand in the reasoning: only the closing tag leads out of it.
    """

    constraint: Constraint
    opening: str
    closing: str
    opened: bool

    @property
    def tries(self) -> int:  # type: ignore[override]
        return self.constraint.tries

    @property
    def close(self) -> bool:  # type: ignore[override]
        return self.constraint.close

    @property
    def hints(self) -> Hints | None:
        return self.constraint.hints

    def of_prompt(self, prompt: str) -> AfterReasoning:
        return self._around(self.constraint.of_prompt(prompt))

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        return self._started(tokenizer, vocab_size, None)

    def begin(self, tokenizer: Tokenizer, vocab_size: int, limit: int) -> ConstraintState:
        return self._started(tokenizer, vocab_size, limit)

    def report(self) -> Report:
        return self.constraint.report()

    def watch(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        inner = self.constraint.incremental_validator(tokenizer)
        return None if inner is None else _WatchAfter(inner, tokenizer, self._tags())

    def narrowed(self, number: int) -> AfterReasoning | None:
        inner = self.constraint.narrowed(number)
        return None if inner is None else self._around(inner)

    def _around(self, constraint: Constraint) -> AfterReasoning:
        return AfterReasoning(constraint, self.opening, self.closing, self.opened)

    def _tags(self) -> _Tags:
        return _Tags(self.opening.encode(), self.closing.encode(), self.opened)

    def _started(
        self, tokenizer: Tokenizer, vocab_size: int, limit: int | None
    ) -> AfterReasoningState:
        first = self.constraint.start(tokenizer, vocab_size)  # an error comes now, not later
        tags = self._tags()

        def answer(said: int) -> ConstraintState:
            if limit is None:
                return self.constraint.start(tokenizer, vocab_size)
            return self.constraint.begin(tokenizer, vocab_size, max(0, limit - said))

        masks = _masks(tags, vocabulary(tokenizer, vocab_size), tokenizer.eos_ids)
        trail = _Trail(tags.start, 0, None if self.opened else answer(0), None)
        origin = None if first.origin is None else (tags, first.origin)
        return AfterReasoningState(masks, answer, trail, origin)


class _Position(NamedTuple):
    """Where a text stands before its answer: `matched` bytes of the tag that comes next, or line
    breaks behind the closing tag."""

    phase: int
    matched: int = 0


@dataclass(frozen=True)
class _Tags:
    """The automaton of the tags, over the bytes of tokens."""

    opening: bytes
    closing: bytes
    opened: bool

    @property
    def start(self) -> _Position:
        return _Position(_REASONING if self.opened else _START)

    def after(self, position: _Position, piece: bytes) -> _Position | None:
        """The place behind a token's bytes; None where the token can only belong to the answer, or
        would stand half in the reasoning and half in the answer."""
        if position.phase == _REASONING:
            return self._reasoned(position.matched, piece)
        if not piece:
            return None
        if position.phase == _CLOSED:
            count = position.matched + len(piece)
            fits = not piece.strip(b"\n") and count <= MAX_LINE_BREAKS
            return _Position(_CLOSED, count) if fits else None
        text = self.opening[: position.matched] + piece
        if text.startswith(self.opening):
            return self._reasoned(0, text[len(self.opening) :])
        return _Position(_START, len(text)) if self.opening.startswith(text) else None

    def _reasoned(self, matched: int, piece: bytes) -> _Position | None:
        for at, byte in enumerate(piece, 1):
            matched = _matched(self.closing, matched, byte)
            if matched == len(self.closing):
                closed = _Position(_CLOSED)
                return self.after(closed, piece[at:]) if piece[at:] else closed
        return _Position(_REASONING, matched)


@lru_cache(4096)
def _matched(tag: bytes, matched: int, byte: int) -> int:
    """How many bytes of `tag` a text ends with behind `byte`, where it was `matched` before."""
    text = tag[:matched] + bytes([byte])
    return next(size for size in range(len(text), -1, -1) if text.endswith(tag[:size]))


class _Masks:
    """Tokens that lead from a place before the answer to another one."""

    def __init__(self, tags: _Tags, pieces: list[bytes], eos_ids: frozenset[int]) -> None:
        self.tags = tags
        self._pieces = pieces
        self._eos_ids = eos_ids
        self._known: dict[_Position, np.ndarray | None] = {}

    def after(self, position: _Position, token: int) -> _Position | None:
        """The place behind `token`; None where it does not lead to one."""
        return None if token in self._eos_ids else self.tags.after(position, self._pieces[token])

    def mask(self, position: _Position) -> np.ndarray | None:
        """Boolean `[vocab_size]` of the tokens that lead on, or None where none does."""
        if position not in self._known:
            mask = np.full(len(self._pieces), position.phase == _REASONING)
            mask[list(self._eos_ids)] = False
            for token in self._doubtful(position):
                mask[token] = self.after(position, token) is not None
            self._known[position] = mask if mask.any() else None
        return self._known[position]

    def _doubtful(self, position: _Position) -> Iterator[int]:
        """Tokens that have to be looked at: elsewhere than in the reasoning the others lead
        nowhere, and there they lead on."""
        if position.phase == _CLOSED:
            needed = b"\n"
        elif position.phase == _START:
            needed = self.tags.opening[position.matched :][:1]
        else:
            needed = self.tags.closing[-1:]
        return (token for token, piece in enumerate(self._pieces) if needed in piece)


_known: WeakKeyDictionary[Vocabulary, dict[_Tags, _Masks]] = WeakKeyDictionary()


def _masks(tags: _Tags, words: Vocabulary, eos_ids: frozenset[int]) -> _Masks:
    """The masks of `tags` for one vocabulary, computed once."""
    known = _known.setdefault(words, {})
    if tags not in known:
        known[tags] = _Masks(tags, words.pieces, eos_ids)
    return known[tags]


@dataclass
class _Trail:
    """A place behind `said` tokens. `answer` is the constraint's state for an answer that begins
    here, or has begun already at the start; None where there is none (yet)."""

    position: _Position
    said: int
    answer: ConstraintState | None
    before: _Trail | None


class AfterReasoningState(ConstraintState):
    """Before the answer a trail of places, which forks share; in the answer the constraint's own
    state. Until a token can only belong to one of the two, both are followed."""

    def __init__(
        self,
        masks: _Masks,
        answer: Callable[[int], ConstraintState],
        trail: _Trail,
        origin: Hashable,
    ) -> None:
        self.origin = origin
        self._masks = masks
        self._answer = answer
        self._trail = trail
        self._inner: ConstraintState | None = None
        self._answered = 0

    def mask(self) -> np.ndarray | None:
        own, inner = self._own(), self._state()
        if inner is None:
            return own
        mask = inner.mask()
        return mask if own is None or mask is None else mask | own

    def allows(self, token: int) -> bool:
        if self._leads(token) is not None:
            return True
        inner = self._state()
        return inner is not None and inner.allows(token)

    def follows(self, tokens: Sequence[int]) -> bool:
        inner = self._state()
        return inner.follows(tokens) if inner and self._answered else super().follows(tokens)

    def advance(self, token: int) -> None:
        position, inner = self._leads(token), self._state()
        if position is not None:
            beside = None
            if position.phase == _START and inner is not None and inner.allows(token):
                beside = inner
                beside.advance(token)
            self._trail = _Trail(position, self._trail.said + 1, beside, self._trail)
            self._inner = None
        elif inner is not None:
            inner.advance(token)
            self._answered += 1
        else:
            raise ConstraintError(f"token {token} is not allowed before the answer")

    def rollback(self, count: int) -> None:
        answered = min(count, self._answered)
        if answered and self._inner is not None:
            self._inner.rollback(answered)
            self._answered -= answered
        for _ in range(count - answered):
            if self._trail.before is None:
                raise ConstraintError(f"cannot take back {count} tokens")
            self._trail, self._inner = self._trail.before, None

    def fork(self) -> AfterReasoningState:
        return self._with(None if self._inner is None else self._inner.fork())

    def forced(self) -> list[int]:
        inner = self._state()
        return inner.forced() if inner is not None and self._own() is None else []

    def without(self, banned: Sequence[int]) -> ConstraintState:
        inner = self._state()
        return super().without(banned) if inner is None else self._with(inner.without(banned))

    @property
    def before(self) -> int:
        """How many tokens came before the answer: all of them where it has not begun."""
        is_start = self._trail.position.phase == _START
        return 0 if is_start and self._state() is not None else self._trail.said

    @property
    def wider(self) -> ConstraintState | None:
        inner = self._state()
        return None if inner is None else inner.wider

    @property
    def steered(self) -> bool:
        inner = self._state()
        return inner is not None and inner.steered

    @property
    def may_stop(self) -> bool:
        inner = self._state()
        return inner is not None and inner.may_stop

    @property
    def finished(self) -> bool:
        inner = self._state()
        return inner is not None and self._own() is None and inner.finished

    def prepare(self) -> None:
        inner = self._state()
        if inner is not None:
            inner.prepare()

    def _with(self, inner: ConstraintState | None) -> AfterReasoningState:
        other = AfterReasoningState(self._masks, self._answer, self._trail, self.origin)
        other._inner, other._answered = inner, self._answered
        return other

    def _own(self) -> np.ndarray | None:
        """What may follow outside of the answer; None where nothing may."""
        return None if self._answered else self._masks.mask(self._trail.position)

    def _leads(self, token: int) -> _Position | None:
        """The place outside of the answer that `token` leads to."""
        return None if self._answered else self._masks.after(self._trail.position, token)

    def _state(self) -> ConstraintState | None:
        """The answer's state; None where the text stands in the reasoning."""
        if self._inner is None:
            trail = self._trail
            if trail.position.phase == _CLOSED and trail.answer is None:
                trail.answer = self._answer(trail.said)
            self._inner = None if trail.answer is None else trail.answer.fork()
        return self._inner


class _WatchAfter:
    """A watch of the answer, which is told nothing of the reasoning."""

    def __init__(self, inner: IncrementalValidator, tokenizer: Tokenizer, tags: _Tags) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self._tags = tags
        self._position: _Position | None = tags.start  # None: in the answer
        self._held: list[int] = []  # tokens of the answer, or of the opening tag
        self._before = 0

    def push(self, token: int) -> int | None:
        if self._position is not None:
            piece = self._tokenizer.token_bytes(token)
            self._position = self._tags.after(self._position, piece)
        if self._position is None or self._position.phase == _START:
            self._held.append(token)
        else:
            self._before += len(self._held) + 1
            self._held = []
        return None if self._position is not None else self._caught_up()

    def end(self) -> int | None:
        wrong = self._caught_up()
        return self._counted(self._inner.end()) if wrong is None else wrong

    def _caught_up(self) -> int | None:
        """Tell the inner watch what belongs to the answer."""
        held, self._held = self._held, []
        found = [self._inner.push(token) for token in held]
        return self._counted(next((wrong for wrong in found if wrong is not None), None))

    def _counted(self, wrong: int | None) -> int | None:
        return None if wrong is None else wrong + self._before
