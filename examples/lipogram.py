"""A constraint outside the package: the text must not contain a given letter.

anydecode generate --decoder lipogram:letter=e --prompt "Once upon a time"
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode import (
    Card,
    Constraint,
    ConstraintError,
    ConstraintReport,
    ConstraintState,
    InvalidRequestError,
    Tokenizer,
    register,
)


@register(
    Card(
        "lipogram",
        "constraint",
        paper="an example",
        exactness="lossy",
        summary="Forbids a letter.",
    )
)
@dataclass(frozen=True)
class Lipogram(Constraint):
    """Allows the texts without a letter.

    Args:
        letter: An ASCII letter, forbidden in both cases.
    """

    letter: str = "e"

    def __post_init__(self) -> None:
        if len(self.letter) != 1 or not self.letter.isascii() or not self.letter.isalpha():
            raise InvalidRequestError(f"letter must be one ASCII letter, not {self.letter!r}")

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        forbidden = {self.letter.lower().encode(), self.letter.upper().encode()}
        size = min(vocab_size, tokenizer.vocab_size)
        allowed = np.zeros(vocab_size, bool)
        for token in range(size):
            text = tokenizer.token_bytes(token)
            allowed[token] = bool(text) and not any(letter in text for letter in forbidden)
        allowed[list(tokenizer.eos_ids)] = True
        return LipogramState(self, allowed, tokenizer.eos_ids)

    def report(self) -> ConstraintReport:
        return ConstraintReport("lipogram", "python", masked=("letter",))


class LipogramState(ConstraintState):
    """The tokens so far. The mask is the same after all of them, until the text has ended."""

    def __init__(
        self,
        lipogram: Lipogram,
        allowed: np.ndarray,
        eos_ids: frozenset[int],
        tokens: tuple[int, ...] = (),
    ) -> None:
        self.origin = lipogram
        self.allowed, self.eos_ids, self.tokens = allowed, eos_ids, tokens

    def mask(self) -> np.ndarray:
        return np.zeros_like(self.allowed) if self.finished else self.allowed

    def advance(self, token: int) -> None:
        if not self.mask()[token]:
            raise ConstraintError(f"token {token} is not allowed here")
        self.tokens = (*self.tokens, token)

    def rollback(self, count: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - count]

    def fork(self) -> LipogramState:
        return LipogramState(self.origin, self.allowed, self.eos_ids, self.tokens)

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def can_stop(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.eos_ids
