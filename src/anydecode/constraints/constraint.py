"""What every constraint is: a description that many requests share, and where one text stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from anydecode.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from anydecode.constraints.completion_hints import Hints


@dataclass(frozen=True)
class Report:
    """How a constraint is enforced: `masked` (before a token is drawn) and `checked` (after a value
    has closed) name keywords, the latter with their path in the schema; `ignored` are annotations
    that forbid nothing, `guards` what was limited beyond what was asked, `engine` who computes the
    masks."""

    kind: str
    engine: str
    masked: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    guards: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON."""
        return {
            "kind": self.kind,
            "engine": self.engine,
            "masked": list(self.masked),
            "checked": list(self.checked),
            "ignored": list(self.ignored),
            "guards": dict(self.guards),
        }


class ConstraintState(ABC):
    """Where one text stands. End-of-text tokens are among the tokens it is told. `origin` is equal
    for states of equal constraints; None where that cannot be told."""

    origin: Hashable = None

    @abstractmethod
    def mask(self) -> np.ndarray | None:
        """Boolean `[vocab_size]` of what may follow, not to be written to; None: anything."""

    @abstractmethod
    def advance(self, token: int) -> None:
        """The text goes on with `token`. Raises `ConstraintError` if it may not."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    @abstractmethod
    def fork(self) -> ConstraintState:
        """The same state for a branch; costs nothing until one of the two moves."""

    @abstractmethod
    def forced(self) -> list[int]:
        """Tokens that must follow, one after the other; empty where there is a choice."""

    @property
    @abstractmethod
    def may_stop(self) -> bool:
        """Whether the text so far is whole."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether nothing but an end-of-text token can follow."""

    def allows(self, token: int) -> bool:
        """Whether `token` may follow."""
        mask = self.mask()
        return mask is None or bool(mask[token])

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens`, none of them an end-of-text token, may follow one after the other."""
        ahead = self.fork()
        for token in tokens:
            if not ahead.allows(token):
                return False
            ahead.advance(token)
        return True

    def without(self, banned: Sequence[int]) -> ConstraintState:
        """The same state, except that none of the tokens `banned` may come next."""
        return TokenBan(self, banned)

    @property
    def before(self) -> int:
        """How many tokens came before the text that the constraint is about."""
        return 0

    @property
    def wider(self) -> ConstraintState | None:
        """A state that allows more, for where nothing that this one allows can be drawn."""
        return None

    @property
    def steered(self) -> bool:
        """Whether the text so far has taken the short way to its end."""
        return False

    def prepare(self) -> None:  # noqa: B027  most states have nothing to compute ahead
        """Begin to compute the next mask, on another thread where that helps."""


class TokenBan(ConstraintState):
    """A constraint's state that does not allow some tokens next."""

    def __init__(self, inner: ConstraintState, banned: Sequence[int], ahead: int = 0) -> None:
        self.inner = inner
        self.banned = list(banned)
        self.ahead = ahead  # tokens behind the place of the ban

    @property
    def may_stop(self) -> bool:
        return self.inner.may_stop

    @property
    def finished(self) -> bool:
        return self.inner.finished

    @property
    def before(self) -> int:
        return self.inner.before

    @property
    def steered(self) -> bool:
        return self.inner.steered

    def mask(self) -> np.ndarray | None:
        mask = self.inner.mask()
        if self.ahead or mask is None:
            return mask
        left: np.ndarray = mask.copy()
        left[self.banned] = False
        return left

    def advance(self, token: int) -> None:
        self.inner.advance(token)
        self.ahead += 1

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        self.ahead -= count

    def fork(self) -> TokenBan:
        return TokenBan(self.inner.fork(), self.banned, self.ahead)

    def forced(self) -> list[int]:
        return self.inner.forced() if self.ahead else []

    def prepare(self) -> None:
        self.inner.prepare()


class IncrementalValidator(Protocol):
    """Looks at one text as it grows for what the mask cannot express."""

    def push(self, token: int) -> int | None:
        """None while nothing is wrong, else how many tokens of the text came before the value that
        is wrong."""
        ...

    def end(self) -> int | None:
        """The same at the end of the text."""
        ...


class Constraint(ABC):
    """A reusable, unchanging description of the texts that are allowed. `tries` is how many wrong
    values an answer may have before it is an error; with `close` an answer that meets the token
    limit is brought to an end within it. `reads_files`: it reads files of the machine as it works,
    so that no request to a server may ask for it."""

    tries: int = 32
    close: bool = False
    reads_files: bool = False

    def of_prompt(self, prompt: str) -> Constraint:
        """This constraint for an answer to `prompt`; the same where the prompt does not matter."""
        return self

    @abstractmethod
    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        """The state before the first token, for logits of width `vocab_size`. Raises
        `ConstraintError` for a constraint that is invalid, unsupported or cannot be met."""

    def begin(self, tokenizer: Tokenizer, vocab_size: int, limit: int) -> ConstraintState:
        """`start` for an answer of at most `limit` tokens."""
        return self.start(tokenizer, vocab_size)

    @property
    def hints(self) -> Hints | None:
        """What is known of short ends; None where that is nothing."""
        return None

    @abstractmethod
    def report(self) -> Report:
        """How this constraint is enforced; known once `start` has been called."""

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        """What checks a text beyond the mask, or None where the mask says it all."""
        return None

    def narrowed(self, number: int) -> Constraint | None:
        """A constraint that allows a part of what this one does and is easier to meet, the
        `number`-th of several; None where there is none."""
        return None
