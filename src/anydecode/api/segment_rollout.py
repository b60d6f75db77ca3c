"""Segmented rollouts: each call generates a limited number of tokens, and the next call continues.

Du et al., "UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language
Models' Reasoning Abilities", arXiv:2507.19766.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError
from anydecode.sampling.params import MAX_SAMPLES


@dataclass(frozen=True)
class UnfinishedSample:
    """An unfinished sample: its index among the samples, and its tokens so far."""

    number: int
    tokens: tuple[int, ...]


@register(
    Card(
        "segment-rollout",
        "serving",
        paper="Du et al. 2025, UloRL, arXiv:2507.19766",
        exactness="token-exact",
        use="RolloutQueue(llm, segment=512) or llm.generate(prompt, segment=512), then"
        " resume=answer.resume",
        summary="Generates long answers in segments; the next call resumes unfinished samples.",
        deviations=(
            "without a `RolloutQueue`, unfinished samples are returned to the caller as plain data,"
            " and the caller resumes them; the engine keeps only the cached prefix",
            "new weights between rounds are another adapter, not weights that replace the model's",
            "the training side (importance sampling, masking of well-mastered tokens) is left to"
            " the caller",
        ),
    )
)
@dataclass(frozen=True)
class Segment:
    """The part of a generation that one call runs.

    Args:
        tokens: Maximum number of tokens per sample in this call; 0 for no limit.
        resume: `Generation.resume` of an earlier call, to continue its samples.
    """

    tokens: int = 0
    resume: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise InvalidRequestError(
                f"segment is {self.tokens!r}; it must be a number of tokens, 1 or more"
            )

    def samples(self, count: int, vocab_size: int) -> list[UnfinishedSample]:
        """The samples that this call runs: those of `resume`, else `count` new ones."""
        if self.resume is None:
            return [UnfinishedSample(number, ()) for number in range(count)]
        try:
            found = [
                UnfinishedSample(_whole(one["number"]), tuple(map(_whole, one["tokens"])))
                for one in self.resume["samples"]
            ]
        except (KeyError, TypeError, ValueError):
            raise InvalidRequestError(
                "resume is not valid; pass Generation.resume of an earlier call: a seed, and"
                " samples with number and tokens"
            ) from None
        numbers = [one.number for one in found]
        allowed = range(MAX_SAMPLES)
        if not found or len(set(numbers)) < len(numbers) or not {*numbers} <= {*allowed}:
            raise InvalidRequestError(
                "resume needs at least one sample, with different sample numbers from 0 to"
                f" {MAX_SAMPLES - 1}"
            )
        invalid = [
            token for one in found for token in one.tokens if token >= vocab_size or token < 0
        ]
        if invalid:
            raise InvalidRequestError(f"resume: token {invalid[0]} is not in the vocabulary")
        return found

    @property
    def seed(self) -> int | None:
        """The seed of the earlier calls."""
        try:
            return None if self.resume is None else _whole(self.resume["seed"])
        except (KeyError, TypeError, ValueError):
            raise InvalidRequestError("resume has no seed") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value
