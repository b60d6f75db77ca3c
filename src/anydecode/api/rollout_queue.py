"""The queue of segmented rollouts: samples of a training run that continue from round to round,
under the weights of each round.

Du et al., "UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language
Models' Reasoning Abilities", arXiv:2507.19766.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anydecode.api.generation import Generation
from anydecode.api.segment_rollout import Segment
from anydecode.arguments import checked_arguments
from anydecode.errors import InvalidRequestError
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.sampling.noise import fresh_seed
from anydecode.sampling.params import MAX_SAMPLES

if TYPE_CHECKING:
    from anydecode.api.llm import LLM
    from anydecode.api.options import Prompt
    from anydecode.api.request import Request

#: What a queue sets itself.
_OWN = ("n", "seed", "segment", "resume", "adapter", "first_finish")


@dataclass(frozen=True)
class RolloutSegment:
    """Tokens `start` to `stop` of a sample, generated under `adapter` (None: the model's own
    weights)."""

    adapter: str | None
    start: int
    stop: int


@dataclass(eq=False)
class Rollout:
    """A sample of a queue.

    Attributes:
        prompt: Its prompt.
        number: Its index among the samples of the prompt.
        seed: The seed of the prompt's samples.
        tokens: The tokens generated so far.
        segments: Which weights generated which of them.
        logprobs: One `TokenLogprobs` per token, under the weights that generated it, if the queue's
            options request log-probabilities.
        generation: The result of the last round; None before the first.
    """

    prompt: Prompt
    number: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    segments: list[RolloutSegment] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    generation: Generation | None = None


class RolloutQueue:
    """Generates samples in rounds of one segment each.

    A round continues the samples that are unfinished, the oldest first, and then starts new ones.
    Without a change of the adapter, a sample has the tokens that `LLM.generate` gives in one call.

    Args:
        llm: The model.
        segment: Maximum number of tokens per sample and round.
        capacity: Maximum number of samples per round.
        **options: Options of `LLM.generate`, except those that the queue sets itself.

    Raises:
        InvalidRequestError: If a size is below 1, or an option is one that the queue sets.
    """

    @checked_arguments()
    def __init__(self, llm: LLM, segment: int = 512, capacity: int = 64, **options: Any) -> None:
        if segment < 1 or capacity < 1:
            raise InvalidRequestError(
                f"segment is {segment} and capacity is {capacity}; a queue needs 1 or more of both"
            )
        if own := [name for name in _OWN if name in options]:
            raise InvalidRequestError(f"a queue of rollouts sets {own[0]} itself; leave it out")
        self._llm, self._segment, self._capacity = llm, segment, capacity
        self._options = options
        self._rollouts: list[Rollout] = []  # in order of arrival

    @property
    def unfinished(self) -> list[Rollout]:
        """The samples that have begun and not ended, the oldest first."""
        return [one for one in self._rollouts if one.generation is not None]

    def __len__(self) -> int:
        """The number of samples that have not ended."""
        return len(self._rollouts)

    @checked_arguments()
    def add(self, prompt: Prompt, n: int = 1, seed: int | None = None) -> None:
        """Add `n` samples of a prompt, as `LLM.generate(prompt, n=n, seed=seed)` generates them.

        Raises:
            InvalidRequestError: If `n` is out of range, or as `LLM.generate`.
        """
        if not 1 <= n <= MAX_SAMPLES:
            raise InvalidRequestError(f"n is {n}; allowed are 1 to {MAX_SAMPLES}")
        seed = fresh_seed() if seed is None else seed
        rollouts = [Rollout(prompt, number, seed) for number in range(n)]
        self._request(rollouts[0])  # a prompt or options that no round can run are refused here
        self._rollouts += rollouts

    def round(self, adapter: str | None = None) -> list[Rollout]:
        """Generate a segment of each of the first samples, and return those that have ended.

        Args:
            adapter: Name of the adapter of this round's weights; None for the model's own.

        Raises:
            InvalidRequestError: As `LLM.generate`. The queue is then as before.
        """
        chosen = self._rollouts[: self._capacity]
        requests = [self._request(one, adapter) for one in chosen]
        for one, answer in zip(chosen, self._llm._run(requests), strict=True):
            start = len(one.tokens)
            one.segments.append(RolloutSegment(adapter, start, len(answer.tokens)))
            one.tokens, one.generation = answer.tokens, answer
            one.logprobs += (answer.logprobs or [])[start:]
        ended = [one for one in chosen if one.generation and one.generation.resume is None]
        self._rollouts = [one for one in self._rollouts if one not in ended]
        return ended

    def _request(self, one: Rollout, adapter: str | None = None) -> Request:
        """The request for the next segment of a sample."""
        sample = {"number": one.number, "tokens": one.tokens}
        segment = Segment(self._segment, {"seed": one.seed, "samples": [sample]})
        return self._llm.request(one.prompt, segment=segment, adapter=adapter, **self._options)
