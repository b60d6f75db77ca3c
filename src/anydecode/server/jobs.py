"""The work that is tried in a worker process first, as functions that the process imports."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from anydecode.constraints.constraint import Constraint
from anydecode.constraints.guidance_engine import clear_templates
from anydecode.constraints.json import json_schema
from anydecode.constraints.vocabulary import vocabulary
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.models.chat import time_limit


class Limits(NamedTuple):
    """The limits of one job: processor time in seconds, and bytes beyond those that the process
    has before it."""

    seconds: float
    memory: int


class TokenTable:
    """The tokens of a tokenizer, without its code: all that a constraint needs. Implements those
    parts of `models.tokenizer.Tokenizer`."""

    mask_id = None
    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size: int = tokenizer.vocab_size
        self.eos_ids: frozenset[int] = tokenizer.eos_ids
        self.bos_id: int | None = tokenizer.bos_id
        self._token_bytes = vocabulary(tokenizer, self.vocab_size).token_bytes

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for special tokens."""
        return self._token_bytes[token]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The longest matching tokens from left to right; none if a part matches no token."""
        return vocabulary(self, self.vocab_size).tokenize_greedily(text.encode()) or []  # type: ignore[arg-type]


class Compiled(NamedTuple):
    """A constraint with what its compilation found; the tokens of its shortest text, if that was
    searched for; and the size of its pickle, in bytes."""

    constraint: Constraint
    shortest: array[int] | None
    size: int


def compile_constraint(
    tokens: Any,
    vocab_size: int,
    make: Callable[[], Constraint],
    max_tokens: int,
) -> Compiled:
    """Compile the constraint that `make` returns for answers of at most `max_tokens` tokens."""
    try:
        constraint = make()
        constraint.warm(tokens, vocab_size)
        constraint.start_with_limit(tokens, vocab_size, max_tokens)
    except RecursionError:
        raise ConstraintError("the constraint is nested too deep: use fewer levels") from None
    hints = constraint.completion_hints
    shortest = None if hints is None else hints.shortest.get(tokens)
    return Compiled(constraint, shortest, len(pickle.dumps(constraint)))


def render(tokenizer: Any, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Render a conversation with the tokenizer's chat template."""
    try:
        with time_limit(inf):  # the process has a limit of its own
            text: str = tokenizer.render_chat(messages, **variables)
        return text
    except RecursionError:
        raise InvalidRequestError("the conversation is nested too deep to be rendered") from None


def encode(tokenizer: Any, text: str, special: bool) -> array[int]:
    """Token ids of a text."""
    return array("i", tokenizer.encode(text, special=special))


def forget() -> None:
    """Drop what a job has left in caches, so that jobs do not depend on earlier ones."""
    json_schema.clear_compiled()
    clear_templates()
