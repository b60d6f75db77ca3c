"""Several texts of one search, best first: what a decoder gives a request for `n` texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anydecode.scoring.state import StateKey


@dataclass(frozen=True)
class RankedText:
    """A text that a search has found.

    Attributes:
        score: The search's score; texts are ordered by it, the highest first.
        tokens: The token ids, with the end token if the text ends by itself.
        logprobs: One entry per token, as `Sequence.emit` takes them; empty if not requested.
        costs: What the search has subtracted from the text's log-probability.
    """

    score: float
    tokens: list[int]
    logprobs: list[Any]
    costs: float = 0.0


#: The texts of a finished search, best first; the first is the one that the decoder has emitted.
RANKED: StateKey[list[RankedText]] = StateKey("search", "ranked")
