"""Several continuations of one sequence that are sampled side by side: the part that methods share
which sample texts, value them and choose among them.

The prompt is scored and stored once, whatever the number of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from anydecode.decoders.framework.branches import TextStopChecker, share_prefixes
from anydecode.errors import InvalidRequestError
from anydecode.rewards.reward import SampledText
from anydecode.sampling.noise import Noise, stream_id
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ActionResult, DecoderAction, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

#: Maximum number of rollouts of one sequence.
MAX_ROLLOUTS = 1024


@dataclass
class Rollout:
    """A continuation as plain data.

    Attributes:
        noise: The random numbers of its next tokens.
        tokens: Its tokens.
        logprobs: The requested log-probabilities of the tokens.
        total: The sum of the log-probabilities of the tokens, of the model's unmodified logits;
            NaN if nothing reads it.
        finish_reason: Why it ended, or None while it goes on.
        start: The number of tokens before its current step.
        start_text: The number of characters before its current step.
        temperature: The temperature of its next tokens; None for that of its group.
        sampler: The sampler behind its tokens, if it has learned from their logits, which a restart
            does not compute again.
    """

    noise: Noise
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    total: float = 0.0
    finish_reason: str | None = None
    start: int = 0
    start_text: int = 0
    temperature: float | None = None
    sampler: Sampler | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def copy(self, noise: Noise) -> Rollout:
        """A rollout with the same tokens and other random numbers from here on."""
        tokens, logprobs = list(self.tokens), list(self.logprobs)
        return replace(self, noise=noise, tokens=tokens, logprobs=logprobs)


Extending = Generator[DecoderAction, ActionResult, None]


class Rollouts:
    """The branches of some rollouts.

    Args:
        sequence: The sequence that they continue.
        rollouts: Changed as they go on. Kept by the decoder in `sequence.state`, they are all that
            a restart needs.
        sums_logprobs: Whether `Rollout.total` is computed.
        temperature: The temperature of the rollouts; None for that of the sequence.
        runner: The model that samples them. "target" for the one that is decoded.
        on_token: Called before a token is appended, with the number of the rollout, its branch, the
            logits float32 `[vocab_size]` and the token.
        origins: Branches that have all tokens of some rollouts, by the numbers of the rollouts,
            which go on from the caches of these branches.
    """

    def __init__(
        self,
        sequence: Sequence,
        rollouts: list[Rollout],
        *,
        sums_logprobs: bool = False,
        temperature: float | None = None,
        runner: str = TARGET,
        on_token: Callable[[int, Sequence, np.ndarray, int], None] | None = None,
        origins: Mapping[int, Sequence] | None = None,
    ) -> None:
        self.sequence = sequence
        self.rollouts = rollouts
        self.sums_logprobs = sums_logprobs
        self.temperature = temperature
        self.runner = runner
        self.on_token = on_token
        self._origins = origins or {}
        self._branches: list[Sequence] = []

    def extend(self, is_done: Callable[[int], bool]) -> Extending:
        """Sample tokens in every rollout that has not finished, until `is_done(number)` of it. It
        is called before each token, and depends on the rollout alone. Rollouts with the same tokens
        share a row."""
        if not self._branches:
            yield from self._open()
        # Equal if the tokens are; after a step, if the tokens before it and the last one are.
        texts: list[Hashable] = [tuple(rollout.tokens) for rollout in self.rollouts]
        while True:
            live = [
                number
                for number, rollout in enumerate(self.rollouts)
                if not rollout.finished and not is_done(number)
            ]
            if not live:
                return
            same: dict[Hashable, list[int]] = {}
            for number in live:
                same.setdefault(texts[number], []).append(number)
            results = yield [
                self._branches[first].score(runner=self.runner) for first, *_ in same.values()
            ]
            for (first, *others), scores in zip(same.values(), results, strict=True):
                row = scores.row(-1)
                for number in others:
                    branch = self._branches[number]
                    branch.share_caches(self._branches[first])
                    scores.show_hidden(branch.sampler, -1)
                    self._sample(number, row)
                self._take(first, row, scores.sampled[-1])
                for number in (first, *others):
                    texts[number] = first, self.rollouts[number].tokens[-1]

    def resample(self, ancestors: Seq[int], noises: Seq[Noise]) -> None:
        """Replace every rollout `i` by a copy of rollout `ancestors[i]` with the random numbers
        `noises[i]`. Their caches are shared."""
        old, branches = list(self.rollouts), list(self._branches)
        self.rollouts[:] = [
            old[ancestor].copy(noise) for ancestor, noise in zip(ancestors, noises, strict=True)
        ]
        if branches:
            self._branches = [
                self._branch(branches[ancestor], rollout)
                for ancestor, rollout in zip(ancestors, self.rollouts, strict=True)
            ]
            for branch in branches:
                branch.release()

    def forked(
        self, ancestors: Seq[int], noises: Seq[Noise], temperature: float | None = None
    ) -> Rollouts:
        """Another group, of a copy of each rollout `ancestors[i]` with the random numbers
        `noises[i]`. Their caches are shared; both groups are released on their own.

        Args:
            ancestors: Numbers of rollouts of this group, which has been extended.
            noises: One per ancestor.
            temperature: The temperature of the copies; None for that of this group.
        """
        rollouts = [
            self.rollouts[ancestor].copy(noise)
            for ancestor, noise in zip(ancestors, noises, strict=True)
        ]
        group = Rollouts(
            self.sequence,
            rollouts,
            sums_logprobs=self.sums_logprobs,
            temperature=self.temperature if temperature is None else temperature,
            runner=self.runner,
            on_token=self.on_token,
        )
        group._branches = [
            group._branch(self._branches[ancestor], rollout)
            for ancestor, rollout in zip(ancestors, rollouts, strict=True)
        ]
        return group

    def begin_step(self, number: int) -> None:
        """Let a step of rollout `number` begin at its end."""
        rollout = self.rollouts[number]
        rollout.start, rollout.start_text = len(rollout.tokens), len(self.text(number))

    def texts(self) -> list[SampledText]:
        """The texts so far, as rewards read them."""
        return [
            SampledText(
                cast(TextStopChecker, branch.stop_checker).text,
                len(branch.tokens),
                rollout.total if self.sums_logprobs else float("nan"),
                rollout.finish_reason == "stop",
            )
            for branch, rollout in zip(self._branches, self.rollouts, strict=True)
        ]

    def open_branches(self) -> list[Sequence]:
        """Open the branches of a group that is not extended itself: other groups continue them.
        Nothing is scored."""
        self._branches = [
            self._branch(self._origins.get(number, self.sequence), rollout)
            for number, rollout in enumerate(self.rollouts)
        ]
        return self._branches

    def branch(self, number: int) -> Sequence:
        """The branch of a rollout."""
        return self._branches[number]

    def release_others(self, number: int) -> Sequence:
        """Free the memory of all branches but that of rollout `number`, which is returned."""
        kept = self._branches.pop(number)
        self.release()
        return kept

    def text(self, number: int) -> str:
        """The text of a rollout so far."""
        return cast(TextStopChecker, self._branches[number].stop_checker).text

    def release(self) -> None:
        """Free the memory of all branches."""
        for branch in self._branches:
            branch.release()
        self._branches = []

    def _open(self) -> Extending:
        """Score what is unscored of the sequence and open the branches. Rollouts without tokens
        sample their first."""
        if not self.sequence.unscored(self.runner):  # then all rollouts have tokens
            self.open_branches()
            yield from self._share()
            return
        scores: Scores = yield self.sequence.score(runner=self.runner)
        row = scores.row(-1).copy()
        self.open_branches()
        for number, rollout in enumerate(self.rollouts):
            if not rollout.tokens:
                branch = self._branches[number]
                scores.show_hidden(branch.sampler, -1)
                self._sample(number, row)
        yield from self._share()

    def _share(self) -> Extending:
        """Let the rollouts that go on share what their texts have in common."""
        pairs = zip(self._branches, self.rollouts, strict=True)
        return share_prefixes([one for one, rollout in pairs if not rollout.finished], self.runner)

    def _branch(self, origin: Sequence, rollout: Rollout) -> Sequence:
        """A branch with the tokens of `rollout`, of which `origin` may have the first ones."""
        sequence = self.sequence
        branch = origin.branch() if origin is not sequence else sequence.fork()
        branch.compute_logprobs = sequence.compute_logprobs
        branch.noise = rollout.noise
        temperature = self.temperature if rollout.temperature is None else rollout.temperature
        if temperature is not None:
            sampler = branch.sampler
            branch.sampler = Sampler(
                temperature, sampler.pre_temperature, combiner=sampler.combiner
            )
        added = rollout.tokens[len(branch.tokens) - len(sequence.tokens) :]
        for token in added:
            branch.append(token)
        if added and rollout.sampler is not None:
            branch.sampler = rollout.sampler.fork()
        stop_checker = cast(TextStopChecker, origin.stop_checker).fork()
        _, reason = stop_checker.push(added)
        rollout.finish_reason = rollout.finish_reason or reason
        branch.stop_checker = stop_checker
        return branch

    def _sample(self, number: int, row: np.ndarray) -> None:
        """Sample a token from the logits after a rollout, and append it."""
        branch = self._branches[number]
        token = branch.sample(branch.sampler, row, branch.length)
        branch.record_logprobs(row, branch.length, token, branch.sampler)
        self._take(number, row, token)

    def _take(self, number: int, row: np.ndarray, token: int) -> None:
        """Append a sampled token to a rollout."""
        rollout, branch = self.rollouts[number], self._branches[number]
        if self.sums_logprobs:
            rollout.total += log_probability(row, token)
        if self.on_token is not None:
            self.on_token(number, branch, row, token)
        branch.emit([token])
        rollout.tokens.append(token)
        if branch.compute_logprobs is not None:
            rollout.logprobs.append(branch.logprobs[-1])
        rollout.finish_reason = branch.finish_reason
        if branch.sampler.learns_from_logits:
            rollout.sampler = branch.sampler.fork()


@dataclass(frozen=True)
class StepRule:
    """Where a step of a rollout ends.

    Args:
        text: The text that ends a step.
        max_tokens: Maximum number of tokens of a step.
    """

    text: str
    max_tokens: int

    def is_done(self, group: Rollouts, number: int) -> bool:
        """Whether rollout `number` has reached the end of its step."""
        rollout = group.rollouts[number]
        if len(rollout.tokens) - rollout.start >= self.max_tokens:
            return True
        begin = max(0, rollout.start_text - len(self.text) + 1)  # it may begin before the step
        return self.text in group.text(number)[begin:]


def log_probability(row: np.ndarray, token: int) -> float:
    """The log-probability of `token` under logits float32 `[vocab_size]`."""
    shifted = row - row.max()
    return float(shifted[token]) - float(np.log(np.exp(shifted).sum(dtype=np.float64)))


def checked_count(key: str, n: int) -> int:
    """`n`, the number of texts that the method `key` samples.

    Raises:
        InvalidRequestError: It is not from 1 to `MAX_ROLLOUTS`.
    """
    if not 1 <= n <= MAX_ROLLOUTS:
        raise InvalidRequestError(f"{key}: n is {n}; it may be 1 to {MAX_ROLLOUTS}")
    return n


def independent_rollouts(
    sequence: Sequence, key: StateKey[list[Rollout]], count: int
) -> list[Rollout]:
    """The rollouts in `sequence.state[key]`. At first, `count` new ones with the random numbers of
    the samples 0, 1, ... of the request; one at temperature 0, where all would be the same."""
    if key not in sequence.state:
        noise = sequence.noise
        count = 1 if sequence.sampler.is_greedy else count
        sequence.state[key] = [
            Rollout(noise.with_stream(stream_id(noise.sample + i, noise.fork, noise.purpose)))
            for i in range(count)
        ]
    return sequence.state[key]
