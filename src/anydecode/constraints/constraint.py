"""Base classes: `Constraint` describes the allowed texts and is shared by requests;
`ConstraintState` tracks one text and computes its token masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from anydecode.models.tokenizer import Tokenizer


class CompletionHints(Protocol):
    """Values and names that a search for a short completion may try. `shortest` caches the length
    of the shortest text by tokenizer; `longest_text` is the length of the schema's longest string,
    in characters. `string_ends` are texts that may end a string that has no quotes. `may_force` is
    whether a text that cannot end yet may be completed by force."""

    @property
    def shortest(self) -> MutableMapping[Tokenizer, array[int]]: ...

    @property
    def values(self) -> list[bytes]: ...

    @property
    def names(self) -> dict[str, bytes]: ...

    @property
    def longest_text(self) -> int: ...

    @property
    def string_ends(self) -> tuple[bytes, ...]: ...

    def ordered(self, allowed: Set[str]) -> list[str]: ...

    def may_force(self, text: str) -> bool: ...


@dataclass(frozen=True)
class ConstraintReport:
    """How a constraint is enforced.

    `masked` names the keywords enforced by token masks, `checked` those validated after a value is
    complete, with their path in the schema. `ignored` lists annotations that forbid nothing,
    `guards` limits added to those of the constraint. `engine` is the library that computes the
    masks.
    """

    kind: str
    engine: str
    masked: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    guards: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON."""
        return {
            "kind": self.kind,
            "engine": self.engine,
            "masked": list(self.masked),
            "checked": list(self.checked),
            "ignored": list(self.ignored),
            "guards": dict(self.guards),
        }


class ConstraintState(ABC):
    """The state of a constraint after the tokens of one text, end-of-text tokens included.

    `origin` identifies the constraint: it is equal for states of equal constraints, and None if
    the constraint cannot be identified.
    """

    origin: Hashable = None

    @abstractmethod
    def mask(self) -> np.ndarray | None:
        """The allowed next tokens, boolean `[vocab_size]`, read-only; None if all are allowed."""

    @abstractmethod
    def advance(self, token: int) -> None:
        """Appends `token`. Raises `ConstraintError` if it is not allowed."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Removes the last `count` tokens."""

    @abstractmethod
    def fork(self) -> ConstraintState:
        """Returns an independent copy. Costs nothing until one of the two changes."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """The tokens that must follow, in order; empty if several tokens are allowed."""

    @property
    @abstractmethod
    def can_stop(self) -> bool:
        """Whether the text so far is complete."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether only an end-of-text token can follow."""

    def allows(self, token: int) -> bool:
        """Whether `token` is allowed next."""
        mask = self.mask()
        return mask is None or bool(mask[token])

    def allows_sequence(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` are allowed next, in order. None of them is an end-of-text token."""
        probe = self.fork()
        for token in tokens:
            if not probe.allows(token):
                return False
            probe.advance(token)
        return True

    def with_banned(self, banned_tokens: Sequence[int]) -> ConstraintState:
        """Returns this state with `banned_tokens` forbidden as the next token."""
        return TokenBan(self, banned_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens before the text that the constraint applies to."""
        return 0

    @property
    def unforced(self) -> ConstraintState | None:
        """The state without a forced completion."""
        return None

    @property
    def is_completing(self) -> bool:
        """Whether the mask allows a forced completion only. A sampler may take another token that
        `unforced` allows and that `fits`."""
        return False

    def fits(self, token: int, num_tried: int = 0) -> bool:
        """Whether a completion within the limit is found behind `token`, which `unforced` allows.
        The search is the shorter, the more tokens were tried before at this position."""
        return True

    @property
    def is_forced(self) -> bool:
        """Whether the text so far contains tokens of a forced completion."""
        return False

    def limit_searches(self, num_tries: int) -> None:  # noqa: B027  most states search nothing
        """Limits the searches for completions of a text that is generated after `num_tries` tries
        of the same answer."""

    def prepare(self) -> None:  # noqa: B027  most states have nothing to compute in advance
        """Starts to compute the next mask, on another thread if that is faster."""


class TokenBan(ConstraintState):
    """A constraint's state with some tokens forbidden at one position."""

    def __init__(
        self, inner: ConstraintState, banned_tokens: Sequence[int], num_after: int = 0
    ) -> None:
        self.inner = inner
        self.banned_tokens = list(banned_tokens)
        self.num_after = num_after  # tokens after the position of the ban

    @property
    def can_stop(self) -> bool:
        return self.inner.can_stop

    @property
    def finished(self) -> bool:
        return self.inner.finished

    @property
    def num_reasoning_tokens(self) -> int:
        return self.inner.num_reasoning_tokens

    @property
    def unforced(self) -> ConstraintState | None:
        return self.inner.unforced if self.num_after else None

    @property
    def is_completing(self) -> bool:
        return self.num_after > 0 and self.inner.is_completing

    def fits(self, token: int, num_tried: int = 0) -> bool:
        return self.inner.fits(token, num_tried)

    @property
    def is_forced(self) -> bool:
        return self.inner.is_forced

    def mask(self) -> np.ndarray | None:
        mask = self.inner.mask()
        if self.num_after or mask is None:
            return mask
        allowed: np.ndarray = mask.copy()
        allowed[self.banned_tokens] = False
        return allowed

    def advance(self, token: int) -> None:
        self.inner.advance(token)
        self.num_after += 1

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        self.num_after -= count

    def fork(self) -> TokenBan:
        return TokenBan(self.inner.fork(), self.banned_tokens, self.num_after)

    def forced_tokens(self) -> list[int]:
        return self.inner.forced_tokens() if self.num_after else []

    def limit_searches(self, num_tries: int) -> None:
        self.inner.limit_searches(num_tries)

    def prepare(self) -> None:
        self.inner.prepare()


class IncrementalValidator(Protocol):
    """Validates one growing text against the rules that a mask cannot express.

    A validator may have two properties: `num_settled`, the number of tokens that no later token
    makes invalid, and `settled_text`, their part of the answer. Retries keep these tokens, and
    streams send them at once.
    """

    def push(self, token: int) -> int | None:
        """Appends `token`. Returns None if no error was found, else the number of tokens before
        the invalid value."""
        ...

    def end(self) -> int | None:
        """Validates the complete text. Returns the same as `push`."""
        ...


class Constraint(ABC):
    """An immutable description of the allowed texts, shared by requests.

    `tries` is the maximum number of retries per answer. With `close`, an answer that reaches the
    token limit is replaced by a complete one within it. `reads_files`: the constraint reads local
    files, so requests to a server cannot use it.
    """

    tries: int = 32
    close: bool = False
    reads_files: bool = False

    def for_prompt(self, prompt: str) -> Constraint:
        """Returns this constraint for an answer to `prompt`; by default the constraint itself."""
        return self

    @abstractmethod
    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        """Returns the state before the first token.

        Args:
            tokenizer: The tokenizer of the model.
            vocab_size: The width of the logits.

        Raises:
            ConstraintError: The constraint is invalid, not supported, or allows no text.
        """

    def start_with_limit(
        self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int
    ) -> ConstraintState:
        """Returns the state of `start` for an answer of at most `max_tokens` tokens."""
        state = self.start(tokenizer, vocab_size)
        return self.with_limit(state, tokenizer, vocab_size, max_tokens)

    def with_limit(
        self, state: ConstraintState, tokenizer: Tokenizer, vocab_size: int, max_tokens: int
    ) -> ConstraintState:
        """Returns the `state` that `start` returned for an answer of at most `max_tokens`
        tokens."""
        return state

    def warm(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compiles what an answer may need, so that neither `start` nor a retry compiles again.
        Raises the errors of `start`."""
        self.start(tokenizer, vocab_size)

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        """Whether `start` compiles nothing, as far as is known."""
        return False

    @property
    def completion_hints(self) -> CompletionHints | None:
        """Values and names that help to find a short completion; None if there are none."""
        return None

    @abstractmethod
    def report(self) -> ConstraintReport:
        """How this constraint is enforced. Available after `start`."""

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        """A validator of the rules that the mask does not express; None if there are none."""
        return None

    def narrowed(self, index: int) -> Constraint | None:
        """The `index`-th narrowed form: a constraint that allows fewer texts and is easier to
        satisfy. None if there is none."""
        return None

    def with_prefix(self, prefix: str) -> Constraint:
        """Returns this constraint for an answer that starts with `prefix`, the settled text of an
        answer under the constraint that this one is a narrowed form of."""
        return self
