"""Interfaces of the parts of a sampler: logits processors and logits combiners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from anydecode.kernels.interface import Truncation
from anydecode.sampling.candidates import Candidates


class LogitsProcessor(ABC):
    """Changes scores or drops candidates; always leaves at least one candidate.

    If `is_stateful` is True, `advance` is called with every token of the text, and `fork` creates
    an independent copy for each branch. Stateless processors are shared by all branches.
    """

    is_stateful = False
    #: Whether `observe_hidden` must be called with the last hidden state of each row before
    #: `apply`. Such a processor is stateful, since the hidden state belongs to one row.
    observes_hidden = False

    #: Whether the state depends on the processed rows too, not only on the tokens.
    learns_from_logits = False

    @abstractmethod
    def apply(self, candidates: Candidates) -> Candidates:
        """The candidates after this rule. May write to `candidates.writable()`."""

    def truncated(self, rule: Truncation) -> Truncation | None:
        """`rule` followed by this one, if the two are one that the kernels know."""
        return None

    def advance(self, token: int) -> None:  # noqa: B027  most processors are stateless
        """Append `token` to the text."""

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:  # noqa: B027
        """Receive the next row: its last hidden state after the final norm, float32
        `[hidden_size]`, and the model's unmodified logits, float32 `[vocab_size]`."""

    def prepare(self) -> None:
        """Called when the pass for the next token starts: begin computing in parallel with it."""

    def fork(self) -> LogitsProcessor:
        """A copy for a branch of the text; must be cheap."""
        return self


class LogitsCombiner(Protocol):
    """Combines several rows of logits into one."""

    @property
    def companions(self) -> int:
        """Number of companion prompts whose logits it needs."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The layers whose logits (hidden state through the model's head) it needs."""
        ...

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """The combined row, float32 `[vocab_size]`; -inf marks a forbidden token.

        Args:
            logits: The sequence's logits, float32 `[vocab_size]`.
            companions: The logits of each companion prompt.
            capture_layers: Logits by layer.
        """
        ...
