"""The parts a policy is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from anydecode.sampling.candidates import Candidates


class LogitsProcessor(ABC):
    """Changes scores or drops candidates; always leaves at least one.

    A processor with `stateful` True is told every token of the text by `advance` and gives each
    branch a state of its own by `fork`. The others are shared by all branches.
    """

    stateful = False
    #: Whether it must be shown the last layer's state of the row it works on, by `see`. Such a part
    #: is stateful: what it was shown belongs to one row.
    observes_hidden = False

    #: Whether it learns from the rows it was asked about, so that the tokens alone do not tell
    #: where it stands.
    learns_from_logits = False

    @abstractmethod
    def apply(self, candidates: Candidates) -> Candidates:
        """The candidates after this rule. May write to `candidates.writable()`."""

    def advance(self, token: int) -> None:  # noqa: B027  most parts have nothing to learn
        """The text goes on with `token`."""

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:  # noqa: B027
        """The next row: its state float32 `[hidden_size]` after the final norm, and the model's own
        logits float32 `[vocab_size]`."""

    def prepare(self) -> None:
        """The model is about to score the next token: begin what can be computed meanwhile."""

    def fork(self) -> LogitsProcessor:
        """The same for a branch; must be cheap."""
        return self


class LogitsCombiner(Protocol):
    """Makes one row of logits from several."""

    @property
    def companions(self) -> int:
        """How many companion contexts it wants."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The layers whose logits, through the model's head, it wants."""
        ...

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """float32 `[vocab_size]`; -inf marks a token that must not be said."""
        ...
