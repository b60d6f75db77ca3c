"""Long answers in segments: every call says a stretch, and the next one goes on from there.

Du et al., "UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language
Models' Reasoning Abilities", arXiv:2507.19766.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError
from anydecode.sampling.params import MOST_SAMPLES


@dataclass(frozen=True)
class Unfinished:
    """A sample that has not ended: its number among the samples, and its tokens so far."""

    number: int
    tokens: tuple[int, ...]


@register(
    Card(
        "segment-rollout",
        "serving",
        paper="Du et al. 2025, UloRL, arXiv:2507.19766",
        exactness="token-exact",
        summary="A call says at most so many tokens; the next one resumes what has not ended.",
        deviations=(
            "what is unfinished is handed to the caller as plain data, who asks again when there is"
            " room; nothing is kept here but the shared prefix",
            "the training side (importance sampling, masking of well-mastered tokens) is the"
            " caller's",
        ),
    )
)
@dataclass(frozen=True)
class Segment:
    """This call says at most `tokens` tokens per sample (0: no limit of its own), and goes on with
    the samples of `resume`: what an earlier `Generation.resume` said."""

    tokens: int = 0
    resume: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise InvalidRequestError("segment is a number of tokens, 1 or more")

    def samples(self, count: int, vocab_size: int) -> list[Unfinished]:
        """The samples this call works on; `count` of them where nothing is resumed."""
        if self.resume is None:
            return [Unfinished(number, ()) for number in range(count)]
        try:
            found = [
                Unfinished(_whole(one["number"]), tuple(map(_whole, one["tokens"])))
                for one in self.resume["samples"]
            ]
        except (KeyError, TypeError, ValueError):
            raise InvalidRequestError(
                "resume is what an earlier answer gave: a seed, and samples with number and tokens"
            ) from None
        numbers = [one.number for one in found]
        positions = range(MOST_SAMPLES)
        if not found or len(set(numbers)) < len(numbers) or not {*numbers} <= {*positions}:
            raise InvalidRequestError("resume names no sample, one twice, or one that cannot be")
        wrong = [token for one in found for token in one.tokens if token >= vocab_size or token < 0]
        if wrong:
            raise InvalidRequestError(f"resume: token {wrong[0]} is not in the vocabulary")
        return found

    @property
    def seed(self) -> int | None:
        """The seed of the calls before."""
        try:
            return None if self.resume is None else _whole(self.resume["seed"])
        except (KeyError, TypeError, ValueError):
            raise InvalidRequestError("resume has no seed") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value
