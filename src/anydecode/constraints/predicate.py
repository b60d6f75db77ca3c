"""Any Python function as a constraint."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from anydecode.constraints.constraint import Constraint, ConstraintState, Report
from anydecode.constraints.vocabulary import vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Texts whose verdicts are remembered.
_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class Predicate(Constraint):
    """Texts for which `complete(text)` is true. `prefix(text)` tells whether a text can still
    become one of them: true for every beginning of an allowed text, and for allowed texts
    themselves. Without it every beginning is thought possible, and only the end is checked.

    The mask asks `prefix` once per token of the vocabulary that can be told apart; decoder `awrs`
    asks for the few tokens that it draws instead. Both functions must be pure. A character whose
    bytes are not all there yet is shown to `prefix` as U+FFFD.
    """

    complete: Callable[[str], bool]
    prefix: Callable[[str], bool] | None = None

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> PredicateState:
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        return PredicateState(_Judge(self, tokenizer, vocab_size), ())

    def report(self) -> Report:
        return Report("predicate", "python", masked=("complete", "prefix")[: 1 + bool(self.prefix)])


class _Judge:
    """A predicate over tokens of one tokenizer."""

    def __init__(self, predicate: Predicate, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.predicate = predicate
        self.vocab_size = vocab_size
        self.eos_ids = np.array(sorted(tokenizer.eos_ids), np.int64)
        self.pieces = vocabulary(tokenizer, vocab_size).pieces
        self.count = 0
        self.complete = lru_cache(_REMEMBERED)(self._counted(predicate.complete))
        prefix = predicate.prefix
        self.prefix = None if prefix is None else lru_cache(_REMEMBERED)(self._counted(prefix))

    def _counted(self, function: Callable[[str], bool]) -> Callable[[str], bool]:
        def ask(text: str) -> bool:
            self.count += 1
            return bool(function(text))

        return ask


class PredicateState(ConstraintState):
    """The tokens so far; verdicts are asked for and remembered."""

    def __init__(self, judge: _Judge, tokens: tuple[int, ...]) -> None:
        self.judge = judge
        self.tokens = tokens
        self.origin = judge.predicate
        self._mask: np.ndarray | None = None

    @property
    def num_evaluations(self) -> int:
        """How often the predicate's functions have been called for this request and its forks."""
        return self.judge.count

    def mask(self) -> np.ndarray:
        if self._mask is None:
            judge = self.judge
            allowed = np.zeros(judge.vocab_size, bool)
            if not self._ended:
                for token, piece in enumerate(judge.pieces):
                    allowed[token] = bool(piece) and self._continues(piece)
            allowed[judge.eos_ids] = self.may_stop
            self._mask = allowed
        return self._mask

    def allows(self, token: int) -> bool:
        if self._mask is not None:
            return bool(self._mask[token])
        if token in self.judge.eos_ids:
            return self.may_stop
        piece = self.judge.pieces[token]
        return bool(piece) and not self._ended and self._continues(piece)

    def advance(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError(f"token {token} is not allowed here")
        self.tokens = (*self.tokens, token)
        self._mask = None

    def rollback(self, count: int) -> None:
        if count > len(self.tokens):
            raise ConstraintError(f"cannot take back {count} of {len(self.tokens)} tokens")
        self.tokens = self.tokens[: len(self.tokens) - count]
        self._mask = None

    def fork(self) -> PredicateState:
        branch = PredicateState(self.judge, self.tokens)
        branch._mask = self._mask
        return branch

    def forced(self) -> list[int]:
        return []

    @property
    def may_stop(self) -> bool:
        return self._ended or self.judge.complete(self._text(b""))

    @property
    def finished(self) -> bool:
        return self._ended

    @property
    def _ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.judge.eos_ids

    def _continues(self, piece: bytes) -> bool:
        try:
            text = self._text(piece)
        except UnicodeDecodeError:
            return False
        return self.judge.prefix is None or self.judge.prefix(text)

    def _text(self, piece: bytes) -> str:
        """The text with `piece` behind it, U+FFFD for an unfinished character at its end. Raises
        `UnicodeDecodeError` for bytes that can become no text."""
        said = b"".join(self.judge.pieces[token] for token in self.tokens) + piece
        text, used = codecs.utf_8_decode(said, "strict", False)
        return text if used == len(said) else text + "\ufffd"
