"""What methods share that look ahead before each token: continuations of the most probable tokens,
and their values."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

import numpy as np

from anydecode.decoders.framework.rollouts import Rollout, Rollouts
from anydecode.rewards.reward import SampledText
from anydecode.sampling.candidates import descending, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ActionResult, DecoderAction, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

#: The sum of the log-probabilities of the emitted tokens.
_TOTAL: StateKey[float] = StateKey("looking-ahead", "total")
#: Number of random streams of a sample.
_STREAMS = 4095


@dataclass(frozen=True)
class Continued:
    """The most probable next tokens with their continuations.

    Attributes:
        tokens: The tokens, the most probable first.
        logprobs: Their log-probabilities, float64 `[tokens]`, after penalties and the constraint.
        texts: The text so far with each token and its continuation.
        totals: The log-probability of the text so far with each token, at temperature 1 and without
            penalties; NaN if the reward does not read it.
        group: The continuations.
    """

    tokens: list[int]
    logprobs: np.ndarray
    texts: list[SampledText]
    totals: list[float]
    group: Rollouts


@dataclass(frozen=True)
class _Kept:
    """The token that was taken after `num_before` others, with its continuation, and the branch
    that has computed both."""

    num_before: int
    rollout: Rollout
    branch: Sequence


@dataclass
class Looking:
    """How a method looks ahead in one text.

    A greedy continuation of the token that is taken is also one of the token after it: its keys and
    values are kept, and it grows by one token.

    Args:
        k: How many tokens are continued.
        length: Maximum number of tokens of a continuation.
        temperature: The temperature of the continuations.
        runner: The model that continues.
        reads_logprobs: Whether a reward reads the texts' log-probabilities.
    """

    k: int
    length: int
    temperature: float
    runner: str = TARGET
    reads_logprobs: bool = False
    _kept: _Kept | None = field(default=None, init=False)

    def ahead(
        self, sequence: Sequence, scores: Scores
    ) -> Generator[DecoderAction, ActionResult, Continued]:
        """Continue the most probable tokens after the last row of `scores`."""
        row = scores.row(-1).copy()
        tokens, logprobs = most_probable(scores.sampler_after(-1), row, self.k)
        noise = sequence.noise.with_purpose("search")
        total = sequence.state.get(_TOTAL, 0.0)
        totals = [float("nan")] * len(tokens)
        if self.reads_logprobs:
            shifted = row - row.max()
            sum_log = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
            totals = [total + float(shifted[token]) - sum_log for token in tokens]
        first = len(sequence.tokens) * self.k
        rollouts = [
            Rollout(noise.forked(1 + (first + number) % _STREAMS), [token], total=totals[number])
            for number, token in enumerate(tokens)
        ]
        kept, self._kept, origins = self._kept, None, {}
        if kept is not None and kept.num_before + 1 == len(sequence.tokens):
            tail = kept.rollout.tokens[1:]
            if tail and tail[0] in tokens:
                number = tokens.index(tail[0])
                rollouts[number] = replace(kept.rollout, tokens=tail)
                origins[number] = kept.branch
        group = Rollouts(
            sequence,
            rollouts,
            sums_logprobs=self.reads_logprobs,
            temperature=self.temperature,
            runner=self.runner,
            origins=origins,
        )
        yield from group.extend(lambda number: len(rollouts[number].tokens) > self.length)
        if kept is not None:
            kept.branch.release()
        return Continued(tokens, logprobs, group.texts(), totals, group)

    def emit(self, sequence: Sequence, found: Continued, choice: int, row: np.ndarray) -> None:
        """Emit token `choice`. `row` has the logits after the text."""
        branch = found.group.release_others(choice)
        # Another model's log-probability of the next token is not that of the decoded one.
        is_exact = self.runner == TARGET or not self.reads_logprobs
        if self.temperature == 0 and is_exact:
            self._kept = _Kept(len(sequence.tokens), found.group.rollouts[choice], branch)
        else:
            branch.release()
        if self.reads_logprobs:
            sequence.state[_TOTAL] = found.totals[choice]
        token = found.tokens[choice]
        sequence.record_logprobs(row, sequence.length, token, sequence.sampler)
        sequence.emit([token])


def most_probable(sampler: Sampler, row: np.ndarray, k: int) -> tuple[list[int], np.ndarray]:
    """The `k` most probable tokens under the penalties and the constraint of `sampler`, at
    temperature 1, with their log-probabilities float64."""
    plain = Sampler(1.0, sampler.pre_temperature, combiner=sampler.combiner)
    distribution = plain.distribution(row)
    index = largest(distribution.scores, k)
    index = index[descending(distribution.scores[index])]
    tokens = index if distribution.tokens is None else distribution.tokens[index]
    logprobs = np.array([distribution.log_probability(int(token)) for token in tokens])
    return [int(token) for token in tokens], logprobs
