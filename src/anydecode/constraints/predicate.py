"""Constraints given as Python functions."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anydecode.arguments import check_kinds
from anydecode.constraints.byte_cache import byte_cached
from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
from anydecode.constraints.vocabulary import vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Maximum size of the texts per function whose results are cached, in bytes.
_MAX_CACHED_BYTES = 64 << 20


@dataclass(frozen=True)
class Predicate(Constraint):
    """Allows the texts for which a Python function returns true.

    A mask calls `prefix` once per token of the vocabulary with distinct bytes. The decoder `awrs`
    calls it only for the few tokens that it samples. Both functions must be pure. An incomplete
    UTF-8 character at the end of a text is passed to `prefix` as U+FFFD.

    Args:
        complete: Whether a text is allowed as a whole.
        prefix: Whether a text can still become an allowed one: true for every prefix of an allowed
            text and for allowed texts. If None, every prefix counts as possible, and only the end
            of the text is checked.
    """

    complete: Callable[[str], bool]
    prefix: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        check_kinds(vars(self), type(self), ConstraintError)

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> PredicateState:
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        return PredicateState(_PredicateMatcher(self, tokenizer, vocab_size), ())

    def report(self) -> ConstraintReport:
        return ConstraintReport(
            "predicate", "python", masked=("complete", "prefix")[: 1 + bool(self.prefix)]
        )


class _PredicateMatcher:
    """A predicate for the tokens of one tokenizer, with cached results."""

    def __init__(self, predicate: Predicate, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.predicate = predicate
        self.vocab_size = vocab_size
        self.eos_ids = np.array(sorted(tokenizer.eos_ids), np.int64)
        self.token_bytes = vocabulary(tokenizer, vocab_size).token_bytes
        self.num_calls = 0
        self.complete = byte_cached(_MAX_CACHED_BYTES)(self._counted(predicate.complete))
        prefix = predicate.prefix
        self.prefix = (
            None if prefix is None else byte_cached(_MAX_CACHED_BYTES)(self._counted(prefix))
        )

    def _counted(self, function: Callable[[str], bool]) -> Callable[[str], bool]:
        def counted_call(text: str) -> bool:
            self.num_calls += 1
            return bool(function(text))

        return counted_call


class PredicateState(ConstraintState):
    """The tokens so far, and the mask after them once computed."""

    def __init__(self, matcher: _PredicateMatcher, tokens: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.tokens = tokens
        self.origin = matcher.predicate
        self._mask: np.ndarray | None = None

    @property
    def num_evaluations(self) -> int:
        """The number of calls of the predicate's functions for this request and its forks."""
        return self.matcher.num_calls

    def mask(self) -> np.ndarray:
        if self._mask is None:
            matcher = self.matcher
            allowed = np.zeros(matcher.vocab_size, bool)
            if not self._ended:
                for token, data in enumerate(matcher.token_bytes):
                    allowed[token] = bool(data) and self._continues(data)
            allowed[matcher.eos_ids] = self.can_stop
            self._mask = allowed
        return self._mask

    def allows(self, token: int) -> bool:
        if self._mask is not None:
            return bool(self._mask[token])
        if token in self.matcher.eos_ids:
            return self.can_stop
        data = self.matcher.token_bytes[token]
        return bool(data) and not self._ended and self._continues(data)

    def advance(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError(f"token {token} is not allowed here")
        self.tokens = (*self.tokens, token)
        self._mask = None

    def rollback(self, count: int) -> None:
        if count > len(self.tokens):
            raise ConstraintError(f"cannot roll back {count} of {len(self.tokens)} tokens")
        self.tokens = self.tokens[: len(self.tokens) - count]
        self._mask = None

    def fork(self) -> PredicateState:
        branch = PredicateState(self.matcher, self.tokens)
        branch._mask = self._mask
        return branch

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def can_stop(self) -> bool:
        return self._ended or self.matcher.complete(self._text(b""))

    @property
    def finished(self) -> bool:
        return self._ended

    @property
    def _ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.matcher.eos_ids

    def _continues(self, data: bytes) -> bool:
        try:
            text = self._text(data)
        except UnicodeDecodeError:
            return False
        return self.matcher.prefix is None or self.matcher.prefix(text)

    def _text(self, data: bytes) -> str:
        """The text followed by `data`, with U+FFFD for an incomplete character at its end. Raises
        `UnicodeDecodeError` for bytes that are not a prefix of UTF-8."""
        content = b"".join(self.matcher.token_bytes[token] for token in self.tokens) + data
        text, used = codecs.utf_8_decode(content, "strict", False)
        return text if used == len(content) else text + "\ufffd"
