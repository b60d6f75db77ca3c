"""Rewards that are computed from the text alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar

from anydecode.catalogue import Bounds, Range, Text
from anydecode.errors import InvalidRequestError
from anydecode.rewards.reward import Reward, SampledText


class Likelihood(Reward):
    """The mean log-probability of the tokens under the model itself, in nats."""

    reads_logprobs = True
    is_fast = True
    remote: ClassVar[Mapping[str, Bounds] | None] = {}

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        return [one.logprob / max(1, one.num_tokens) for one in texts]


class Confidence(Reward):
    """The geometric mean of the probabilities of the tokens under the model itself."""

    reads_logprobs = True
    is_fast = True
    bounds = (0.0, 1.0)
    remote: ClassVar[Mapping[str, Bounds] | None] = {}

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        return [min(1.0, math.exp(one.logprob / max(1, one.num_tokens))) for one in texts]


class Length(Reward):
    """How near the number of words is to a wanted one: 1 within `min_words` and `max_words`, and
    outside the smaller of the quotients of the number and its bound.

    Args:
        min_words: The fewest words, separated by white space.
        max_words: The most words; at least 1.
    """

    is_fast = True
    bounds = (0.0, 1.0)
    remote: ClassVar[Mapping[str, Bounds] | None] = {
        "min_words": Range(0, 1_000_000),
        "max_words": Range(1, 1_000_000),
    }

    def __init__(self, min_words: float = 0, max_words: float = 50) -> None:
        if not 0 <= min_words <= max_words or max_words < 1:
            raise InvalidRequestError(
                "reward 'length' needs 0 <= min_words <= max_words and max_words >= 1, not"
                f" {min_words} and {max_words}"
            )
        self.min_words = min_words
        self.max_words = max_words

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        return [self._value(len(one.text.split())) for one in texts]

    def _value(self, count: int) -> float:
        if count < self.min_words:
            return count / self.min_words
        return 1.0 if count <= self.max_words else self.max_words / count


class Keywords(Reward):
    """The share of the given words that the text contains, in upper or lower case.

    Args:
        words: The words, separated by spaces. A word counts wherever its letters occur.
    """

    is_fast = True
    bounds = (0.0, 1.0)
    remote: ClassVar[Mapping[str, Bounds] | None] = {"words": Text(160)}

    def __init__(self, words: str) -> None:
        self.words = [word.casefold() for word in words.split()]
        if not self.words:
            raise InvalidRequestError("reward 'keywords' needs words, separated by spaces")

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        folded = [one.text.casefold() for one in texts]
        return [sum(word in text for word in self.words) / len(self.words) for text in folded]
