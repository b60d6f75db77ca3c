"""A constraint on the answer after the reasoning of a model: the text between the reasoning tags is
free, and the text after the closing tag satisfies the constraint."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.constraint import (
    CompletionHints,
    Constraint,
    ConstraintReport,
    ConstraintState,
    IncrementalValidator,
)
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Maximum number of line breaks between the closing tag and the answer; they belong to neither.
MAX_LINE_BREAKS = 2
_START, _REASONING, _CLOSED = range(3)


@dataclass(frozen=True)
class AfterReasoning(Constraint):
    """Applies a constraint to the text after the reasoning.

    No end-of-text token is allowed in the reasoning: only the closing tag ends it.

    Args:
        constraint: The constraint of the answer.
        opening: The tag that starts the reasoning.
        closing: The tag that ends the reasoning.
        opened: Whether the prompt ends with the opening tag. If not, the generated text may start
            with that tag; if it does not, the constraint applies from the first token.
        header: The text between the closing tag and the answer, in place of line breaks.
    """

    constraint: Constraint
    opening: str
    closing: str
    opened: bool
    header: str = ""

    @property
    def tries(self) -> int:  # type: ignore[override]
        return self.constraint.tries

    @property
    def close(self) -> bool:  # type: ignore[override]
        return self.constraint.close

    @property
    def completion_hints(self) -> CompletionHints | None:
        return self.constraint.completion_hints

    def for_prompt(self, prompt: str) -> AfterReasoning:
        return self._with_constraint(self.constraint.for_prompt(prompt))

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        return self._started(tokenizer, vocab_size, None)

    def start_with_limit(
        self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int
    ) -> ConstraintState:
        return self._started(tokenizer, vocab_size, max_tokens)

    def warm(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.constraint.warm(tokenizer, vocab_size)

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        return self.constraint.is_warm(tokenizer, vocab_size)

    def report(self) -> ConstraintReport:
        return self.constraint.report()

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        inner = self.constraint.incremental_validator(tokenizer)
        return None if inner is None else _AnswerValidator(inner, tokenizer, self._tags())

    def narrowed(self, index: int) -> AfterReasoning | None:
        inner = self.constraint.narrowed(index)
        return None if inner is None else self._with_constraint(inner)

    def with_prefix(self, prefix: str) -> AfterReasoning:
        return self._with_constraint(self.constraint.with_prefix(prefix))

    def _with_constraint(self, constraint: Constraint) -> AfterReasoning:
        return AfterReasoning(constraint, self.opening, self.closing, self.opened, self.header)

    def _tags(self) -> _Tags:
        tags = (self.opening.encode(), self.closing.encode(), self.header.encode())
        return _Tags(*tags, self.opened)

    def _started(
        self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int | None
    ) -> AfterReasoningState:
        # Compiled now, not after the reasoning: errors are raised early, and the engine's thread,
        # on which the answer starts, only copies the state.
        first = self.constraint.start(tokenizer, vocab_size)
        if max_tokens is not None:
            self.constraint.with_limit(first.fork(), tokenizer, vocab_size, max_tokens)
        tags = self._tags()

        def start_answer(num_tokens: int) -> ConstraintState:
            state = first.fork()
            if max_tokens is None:
                return state
            return self.constraint.with_limit(
                state, tokenizer, vocab_size, max(0, max_tokens - num_tokens)
            )

        masks = _masks(tags, vocabulary(tokenizer, vocab_size), tokenizer.eos_ids)
        path = _Path(tags.start, 0, None if self.opened else start_answer(0), None)
        origin = None if first.origin is None else (tags, first.origin)
        return AfterReasoningState(masks, start_answer, path, origin)


class _Position(NamedTuple):
    """A position before the answer: the phase, and the number of bytes matched of the next tag, or
    of the header or line breaks after the closing tag."""

    phase: int
    matched: int = 0


@dataclass(frozen=True)
class _Tags:
    """The automaton of the reasoning tags, over the bytes of tokens."""

    opening: bytes
    closing: bytes
    header: bytes
    opened: bool

    def may_answer(self, position: _Position) -> bool:
        """Whether an answer behind reasoning may start at `position`."""
        return position.phase == _CLOSED and (
            not self.header or position.matched == len(self.header)
        )

    @property
    def start(self) -> _Position:
        return _Position(_REASONING if self.opened else _START)

    def after(self, position: _Position, data: bytes) -> _Position | None:
        """The position after a token's bytes; None if the token belongs to the answer, or would
        belong partly to the reasoning and partly to the answer."""
        if position.phase == _REASONING:
            return self._after_reasoning(position.matched, data)
        if not data:
            return None
        if position.phase == _CLOSED and self.header:
            text = self.header[: position.matched] + data
            return _Position(_CLOSED, len(text)) if self.header.startswith(text) else None
        if position.phase == _CLOSED:
            count = position.matched + len(data)
            fits = not data.strip(b"\n") and count <= MAX_LINE_BREAKS
            return _Position(_CLOSED, count) if fits else None
        text = self.opening[: position.matched] + data
        if text.startswith(self.opening):
            return self._after_reasoning(0, text[len(self.opening) :])
        return _Position(_START, len(text)) if self.opening.startswith(text) else None

    def _after_reasoning(self, matched: int, data: bytes) -> _Position | None:
        for offset, byte in enumerate(data, 1):
            matched = _matched(self.closing, matched, byte)
            if matched == len(self.closing):
                closed_position = _Position(_CLOSED)
                return (
                    self.after(closed_position, data[offset:]) if data[offset:] else closed_position
                )
        return _Position(_REASONING, matched)


@lru_cache(4096)
def _matched(tag: bytes, matched: int, byte: int) -> int:
    """The number of bytes of `tag` that a text ends with after `byte`; `matched` before it."""
    text = tag[:matched] + bytes([byte])
    return next(size for size in range(len(text), -1, -1) if text.endswith(tag[:size]))


class _Masks:
    """Masks of the tokens that lead from one position before the answer to another."""

    def __init__(self, tags: _Tags, token_bytes: list[bytes], eos_ids: frozenset[int]) -> None:
        self.tags = tags
        self._token_bytes = token_bytes
        self._eos_ids = eos_ids
        self._masks_by_position: dict[_Position, np.ndarray | None] = {}

    def after(self, position: _Position, token: int) -> _Position | None:
        """The position after `token`; None if it does not lead to one before the answer."""
        return (
            None if token in self._eos_ids else self.tags.after(position, self._token_bytes[token])
        )

    def mask(self, position: _Position) -> np.ndarray | None:
        """Boolean `[vocab_size]` of the tokens that lead to a position before the answer; None if
        there are none."""
        if position not in self._masks_by_position:
            mask = np.full(len(self._token_bytes), position.phase == _REASONING)
            mask[list(self._eos_ids)] = False
            for token in self._tokens_to_check(position):
                mask[token] = self.after(position, token) is not None
            self._masks_by_position[position] = mask if mask.any() else None
        return self._masks_by_position[position]

    def _tokens_to_check(self, position: _Position) -> Iterator[int]:
        """Tokens that have to be checked one by one. Of the others, all are allowed inside the
        reasoning and none outside of it."""
        if position.phase == _CLOSED and self.tags.header:
            needed_bytes = self.tags.header[position.matched :][:1]
            if not needed_bytes:
                return iter(())
        elif position.phase == _CLOSED:
            needed_bytes = b"\n"
        elif position.phase == _START:
            needed_bytes = self.tags.opening[position.matched :][:1]
        else:
            needed_bytes = self.tags.closing[-1:]
        return (token for token, data in enumerate(self._token_bytes) if needed_bytes in data)


_masks_by_vocabulary: WeakKeyDictionary[Vocabulary, dict[_Tags, _Masks]] = WeakKeyDictionary()


def _masks(tags: _Tags, vocab: Vocabulary, eos_ids: frozenset[int]) -> _Masks:
    """The masks of `tags` for one vocabulary, cached."""
    by_tags = _masks_by_vocabulary.setdefault(vocab, {})
    if tags not in by_tags:
        by_tags[tags] = _Masks(tags, vocab.token_bytes, eos_ids)
    return by_tags[tags]


@dataclass
class _Path:
    """A position after `num_tokens` tokens, linked to the previous one. `answer_state` is the
    constraint's state of an answer that starts here, or of one without reasoning that has started
    already; None if there is none (yet)."""

    position: _Position
    num_tokens: int
    answer_state: ConstraintState | None
    previous: _Path | None


class AfterReasoningState(ConstraintState):
    """The state before and inside the answer.

    Before the answer, a path of positions that forks share; inside it, the constraint's state.
    While the text can still be either the opening tag or an answer, both are tracked.
    """

    def __init__(
        self,
        masks: _Masks,
        start_answer: Callable[[int], ConstraintState],
        path: _Path,
        origin: Hashable,
    ) -> None:
        self.origin = origin
        self._masks = masks
        self._start_answer = start_answer
        self._path = path
        self._inner: ConstraintState | None = None
        self._num_answer_tokens = 0
        self._num_tries = 0

    def mask(self) -> np.ndarray | None:
        outside_mask, inner = self._outside_mask(), self._answer_state()
        if inner is None:
            return outside_mask
        mask = inner.mask()
        return mask if outside_mask is None or mask is None else mask | outside_mask

    def allows(self, token: int) -> bool:
        if self._outside_position(token) is not None:
            return True
        inner = self._answer_state()
        return inner is not None and inner.allows(token)

    def allows_sequence(self, tokens: Sequence[int]) -> bool:
        inner = self._answer_state()
        return (
            inner.allows_sequence(tokens)
            if inner and self._num_answer_tokens
            else super().allows_sequence(tokens)
        )

    def advance(self, token: int) -> None:
        position, inner = self._outside_position(token), self._answer_state()
        if position is not None:
            answer_state = None
            if position.phase == _START and inner is not None and inner.allows(token):
                answer_state = inner
                answer_state.advance(token)
            self._path = _Path(position, self._path.num_tokens + 1, answer_state, self._path)
            self._inner = None
        elif inner is not None:
            inner.advance(token)
            self._num_answer_tokens += 1
        else:
            raise ConstraintError(f"token {token} is not allowed before the answer")

    def rollback(self, count: int) -> None:
        num_from_answer = min(count, self._num_answer_tokens)
        if num_from_answer and self._inner is not None:
            self._inner.rollback(num_from_answer)
            self._num_answer_tokens -= num_from_answer
        for _ in range(count - num_from_answer):
            if self._path.previous is None:
                raise ConstraintError(f"cannot roll back {count} tokens")
            self._path, self._inner = self._path.previous, None

    def fork(self) -> AfterReasoningState:
        return self._with(None if self._inner is None else self._inner.fork())

    def forced_tokens(self) -> list[int]:
        inner = self._answer_state()
        return inner.forced_tokens() if inner is not None and self._outside_mask() is None else []

    def with_banned(self, banned: Sequence[int]) -> ConstraintState:
        inner = self._answer_state()
        return (
            super().with_banned(banned) if inner is None else self._with(inner.with_banned(banned))
        )

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens before the answer: all of them if it has not started."""
        is_start = self._path.position.phase == _START
        return 0 if is_start and self._answer_state() is not None else self._path.num_tokens

    @property
    def unforced(self) -> ConstraintState | None:
        inner = self._answer_state()
        return None if inner is None else inner.unforced

    @property
    def is_completing(self) -> bool:
        inner = self._answer_state()
        return inner is not None and self._outside_mask() is None and inner.is_completing

    def fits(self, token: int, num_tried: int = 0) -> bool:
        inner = self._answer_state()
        return inner is None or inner.fits(token, num_tried)

    @property
    def is_forced(self) -> bool:
        inner = self._answer_state()
        return inner is not None and inner.is_forced

    @property
    def can_stop(self) -> bool:
        inner = self._answer_state()
        return inner is not None and inner.can_stop

    @property
    def finished(self) -> bool:
        inner = self._answer_state()
        return inner is not None and self._outside_mask() is None and inner.finished

    def limit_searches(self, num_tries: int) -> None:
        self._num_tries = num_tries
        if self._inner is not None:
            self._inner.limit_searches(num_tries)

    def prepare(self) -> None:
        inner = self._answer_state()
        if inner is not None:
            inner.prepare()

    def _with(self, inner: ConstraintState | None) -> AfterReasoningState:
        other = AfterReasoningState(self._masks, self._start_answer, self._path, self.origin)
        other._inner, other._num_answer_tokens = inner, self._num_answer_tokens
        other._num_tries = self._num_tries
        return other

    def _outside_mask(self) -> np.ndarray | None:
        """The mask of tokens outside of the answer; None if there are none."""
        return None if self._num_answer_tokens else self._masks.mask(self._path.position)

    def _outside_position(self, token: int) -> _Position | None:
        """The position before the answer that `token` leads to; None if there is none."""
        return None if self._num_answer_tokens else self._masks.after(self._path.position, token)

    def _answer_state(self) -> ConstraintState | None:
        """The answer's state; None inside the reasoning."""
        if self._inner is None:
            path = self._path
            if path.answer_state is None and self._masks.tags.may_answer(path.position):
                path.answer_state = self._start_answer(path.num_tokens)
            if path.answer_state is not None:
                self._inner = path.answer_state.fork()
                self._inner.limit_searches(self._num_tries)
        return self._inner


class _AnswerValidator:
    """An incremental validator of the answer only; tokens of the reasoning are skipped."""

    def __init__(self, inner: IncrementalValidator, tokenizer: Tokenizer, tags: _Tags) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self._tags = tags
        self._position: _Position | None = tags.start  # None: in the answer
        self._pending: list[int] = []  # tokens of the answer, or of the opening tag
        self._num_before = 0

    @property
    def num_settled(self) -> int:
        return self._num_before + getattr(self._inner, "num_settled", 0)

    @property
    def settled_text(self) -> str:
        return getattr(self._inner, "settled_text", "")

    def push(self, token: int) -> int | None:
        if self._position is not None:
            data = self._tokenizer.token_bytes(token)
            self._position = self._tags.after(self._position, data)
        if self._position is None or self._position.phase == _START:
            self._pending.append(token)
        else:
            self._num_before += len(self._pending) + 1
            self._pending = []
        return None if self._position is not None else self._push_pending()

    def end(self) -> int | None:
        num_kept = self._push_pending()
        return self._with_offset(self._inner.end()) if num_kept is None else num_kept

    def _push_pending(self) -> int | None:
        """Pushes the pending tokens of the answer to the inner validator."""
        pending, self._pending = self._pending, []
        results = [self._inner.push(token) for token in pending]
        return self._with_offset(
            next((num_kept for num_kept in results if num_kept is not None), None)
        )

    def _with_offset(self, num_kept: int | None) -> int | None:
        return None if num_kept is None else num_kept + self._num_before
