"""φ-Decoding (Xu et al., "φ-Decoding: Adaptive Foresight Sampling for Balanced Inference-Time
Exploration and Exploitation", arXiv:2503.13288).

A few texts grow step by step. Every possible next step is continued to the end of the text, and
steps are drawn by how much more probable they make the rest of the text and by how many other
continuations resemble theirs.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.clusters import k_means, word_vectors
from anydecode.decoders.framework.rollouts import Rollout, Rollouts, StepRule
from anydecode.decoders.search.beam import emit_ranked, whole_distribution_sampler
from anydecode.errors import InvalidRequestError
from anydecode.sampling.noise import Noise
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Maximum number of texts that are sampled: the number of random streams of a sample.
MAX_STREAMS = 4095
#: The temperature of all draws of steps and texts.
SHARPNESS = 0.1
_NUM_CLUSTERS, _LAST_CLUSTERS = 3, 2
#: What random numbers are drawn for.
_REFILL, _CHOICE, _CENTRES = range(3)


@dataclass
class Beams:
    """What a restart needs. Changed at the end of a round only.

    Attributes:
        rollouts: The texts that grow.
        values: The mean log-probability of each one's foreseen rest.
        num_rounds: How many steps they have.
        is_over: Whether no more steps are chosen.
    """

    rollouts: list[Rollout]
    values: list[float]
    num_rounds: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Foresight:
    """Texts and what is foreseen of them.

    Attributes:
        rollouts: The whole texts, of which the rest is the last step.
        texts: The rests.
        values: The mean log-probability of the tokens of each rest.
        advantages: How much that is above the value of its beginning, float64.
    """

    rollouts: list[Rollout]
    texts: list[str]
    values: list[float]
    advantages: np.ndarray

    @property
    def pool(self) -> np.ndarray:
        """Those with a rest that is an advantage, int64."""
        has_rest = [len(one.tokens) > one.start for one in self.rollouts]
        return np.flatnonzero(np.array(has_rest) & (self.advantages > 0))


_STATE: StateKey[Beams] = StateKey("phi", "beams")
Searching = Generator[DecoderAction, ActionResult, Any]


@register(
    Card(
        "phi",
        "search",
        paper="φ-Decoding: Adaptive Foresight Sampling for Balanced Inference-Time Exploration and"
        " Exploitation (arXiv:2503.13288)",
        exactness="lossy",
        summary="Grows a few texts step by step, by how probable and how common the foreseen rests"
        " of the steps are.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when the search ends, not while it runs",
            "rests end where the text would end, also at the request's limit; the paper's have up"
            " to 1024 tokens, and the last ones 3000",
            "a text that ends within its step has that step in place of a rest; it is drawn only if"
            " there are too few others, as in the authors' code",
            "the last draw is from the larger cluster; the authors' code takes another one if that"
            " is the second",
            "without an advantage above 0, the last draw is by advantage; the authors' code draws"
            " by its negative",
            "texts that form no clusters are drawn from the pool alone, at the end as in a round;"
            " the authors' code draws from all",
            "random numbers do not depend on earlier requests",
        ),
        remote={
            "width": Range(1, 4),
            "k": Range(1, 4),
            "step": Text(16),
            "step_tokens": Range(1, 1024),
            "rounds": Range(1, 8),
            "min_rounds": Range(1, 8),
            "sigma": Range(0, 10),
            "share": Range(0, 1),
            "temperature": Range(0.05, 2),
        },
    )
)
class Phi(Decoder):
    """Foresight sampling.

    In each round, `k` next steps are sampled from each of `width` texts. Steps whose mean
    log-probability is more than `sigma` standard deviations below the mean are pruned. The others
    are continued to the end of the text at temperature 1. The advantage of a step is the mean
    log-probability of that rest, less the value of its beginning; that rest's mean log-probability
    is the value of the text with the step. Among the steps with a positive advantage, `width` are
    drawn: half by the softmax of their advantages, half by that of the sizes of their clusters, of
    the words of the rests. If there are fewer, the draw is among all by advantage.

    After `min_rounds` rounds the search ends when more than `share` of the rests are in one
    cluster or all drawn steps are equal; after `rounds` rounds in any case. Then every text is
    continued to its end, and the answer is drawn by advantage from the larger of two clusters.

    The request's temperature and truncations are ignored. A request with `n` above 1 receives
    the other texts too, by the mean log-probabilities of their last rests.

    Args:
        width: The number of texts, and the largest `n` of a request.
        k: How many steps are sampled after a text.
        step: The text that ends a step. Default: the end of a line.
        step_tokens: Maximum number of tokens of a step.
        rounds: Maximum number of rounds.
        min_rounds: Minimum number of rounds.
        sigma: The number of standard deviations.
        share: The largest share of one cluster.
        temperature: The temperature of the steps.
    """

    def __init__(
        self,
        width: int = 4,
        k: int = 4,
        step: str = "\n",
        step_tokens: int = 1024,
        rounds: int = 8,
        min_rounds: int = 4,
        sigma: float = 1.0,
        share: float = 0.7,
        temperature: float = 0.6,
    ) -> None:
        if min(width, k, step_tokens, rounds, min_rounds) < 1 or not step:
            raise InvalidRequestError(
                "phi needs a step, and width, k, step_tokens, rounds and min_rounds of at least 1,"
                f" not {step!r}, {width}, {k}, {step_tokens}, {rounds} and {min_rounds}"
            )
        if sigma < 0 or not 0 <= share <= 1 or temperature <= 0:
            raise InvalidRequestError(
                "phi needs sigma of at least 0, a share from 0 to 1 and a temperature above 0, not"
                f" {sigma}, {share} and {temperature}"
            )
        if (2 * k * rounds + 1) * width > MAX_STREAMS:
            raise InvalidRequestError(
                f"phi: width {width}, k {k} and rounds {rounds} make more than {MAX_STREAMS} texts"
            )
        self.width = width
        self.k = k
        self.step = StepRule(step, step_tokens)
        self.rounds = rounds
        self.min_rounds = min_rounds
        self.sigma = sigma
        self.share = share
        self.temperature = temperature
        self.requirements = Requirements(can_sample=False, forks_text=True, max_texts=width)

    def prepare(self, sequence: Sequence) -> None:
        sequence.sampler = whole_distribution_sampler(sequence.sampler)

    def decode(self, sequence: Sequence) -> Decoding:
        begin = Beams([Rollout(sequence.noise)] * self.width, [0.0] * self.width)
        state = sequence.state.setdefault(_STATE, begin)
        group: Rollouts | None = None
        if state.num_rounds:  # after a restart
            copies = [one.copy(one.noise) for one in state.rollouts]
            group = Rollouts(sequence, copies, sums_logprobs=True, temperature=self.temperature)
            yield from group.extend(lambda number: True)
        while not state.is_over:
            group = yield from self._round(sequence, state, group)
        assert group is not None
        yield from self._finish(sequence, state, group)

    def _round(self, sequence: Sequence, state: Beams, group: Rollouts | None) -> Searching:
        """Let every text grow by one step. Returns the rollouts of the new texts."""
        count = self.width * self.k
        parents = [number // self.k for number in range(count)]
        noises = self._noises(sequence, 2 * count * state.num_rounds, count)
        if group is None:
            steps = Rollouts(
                sequence,
                [Rollout(noise) for noise in noises],
                sums_logprobs=True,
                temperature=self.temperature,
            )
        else:
            steps = group.forked(parents, noises)
            group.release()
            for number in range(count):
                steps.begin_step(number)
        begins = [
            (one.total, state.values[i]) for one, i in zip(steps.rollouts, parents, strict=True)
        ]
        yield from steps.extend(lambda number: self.step.is_done(steps, number))
        means = _means(steps, begins)
        kept = self._kept(sequence, state, np.array(means))
        noises = self._noises(sequence, count * (2 * state.num_rounds + 1), count)
        before = [state.values[parents[number]] for number in kept]
        foresight = yield from self._foresee(
            steps, kept, noises, [means[number] for number in kept], before
        )
        chosen, is_common = self._choice(sequence, state, foresight)
        numbers = [kept[number] for number in chosen]
        grown = steps.forked(numbers, [steps.rollouts[number].noise for number in numbers])
        last = {steps.text(number)[steps.rollouts[number].start_text :] for number in numbers}
        steps.release()
        state.rollouts = [one.copy(one.noise) for one in grown.rollouts]
        state.values = [foresight.values[number] for number in chosen]
        state.num_rounds += 1
        may_end = state.num_rounds >= self.min_rounds and (is_common or len(last) == 1)
        has_ended = all(one.finished for one in grown.rollouts)
        state.is_over = may_end or has_ended or state.num_rounds == self.rounds
        return grown

    def _foresee(
        self,
        group: Rollouts,
        numbers: list[int],
        noises: list[Noise],
        means: list[float],
        before: list[float],
    ) -> Searching:
        """The `Foresight` of some rollouts.

        Args:
            group: The rollouts.
            numbers: Which of them.
            noises: Random numbers, at least one for each.
            means: The value of each that has ended.
            before: The value of the beginning of each.
        """
        rests = group.forked(numbers, noises[: len(numbers)], temperature=1.0)
        for number in range(len(numbers)):
            rests.begin_step(number)
        begins = [(one.total, mean) for one, mean in zip(rests.rollouts, means, strict=True)]
        yield from rests.extend(lambda number: False)
        values = _means(rests, begins)
        texts = [rests.text(i)[one.start_text :] for i, one in enumerate(rests.rollouts)]
        rests.release()
        return Foresight(rests.rollouts, texts, values, np.array(values) - np.array(before))

    def _kept(self, sequence: Sequence, state: Beams, means: np.ndarray) -> list[int]:
        """The steps that are continued: those that are not much less probable than others, and at
        least `width`."""
        is_kept = means > means.mean() - self.sigma * means.std()
        pruned = np.flatnonzero(~is_kept)
        kept = [int(number) for number in np.flatnonzero(is_kept)]
        count = max(0, self.width - len(kept))
        logs = log_shares(means[pruned])
        added = self._draw(sequence, state, _REFILL, logs, count)
        return sorted([*kept, *(int(pruned[number]) for number in added)])

    def _choice(
        self, sequence: Sequence, state: Beams, foresight: Foresight
    ) -> tuple[list[int], bool]:
        """The drawn steps, and whether one cluster has most rests."""
        pool = foresight.pool
        if len(pool) < self.width:
            logs = log_shares(foresight.advantages)
            return self._draw(sequence, state, _CHOICE, logs, self.width), False
        shares = np.exp(log_shares(foresight.advantages[pool]))
        labels = self._clusters(sequence, state, foresight, _NUM_CLUSTERS)
        if labels is None:
            sizes, weights = np.zeros(1), shares
        else:
            sizes = np.bincount(labels) / len(labels)
            common = np.exp(sizes[labels])
            weights = common / common.sum() / 2 + shares / 2
        drawn = self._draw(sequence, state, _CHOICE, np.log(weights), self.width)
        return [int(pool[number]) for number in drawn], bool(sizes.max() > self.share)

    def _clusters(
        self, sequence: Sequence, state: Beams, foresight: Foresight, count: int
    ) -> np.ndarray | None:
        """The cluster of each rest of the pool; None if they have no words or are too few."""
        texts = [foresight.texts[number] for number in foresight.pool]
        vectors = word_vectors(texts)
        if not vectors.any() or len(texts) < count:
            return None
        uniform = self._random(sequence).uniform(range(count), state.num_rounds, _CENTRES)
        return k_means(vectors, count, uniform)

    def _finish(self, sequence: Sequence, state: Beams, group: Rollouts) -> Searching:
        """Continue every text to its end, and emit one."""
        noises = self._noises(sequence, 2 * self.width * self.k * self.rounds, self.width)
        numbers, values = list(range(self.width)), state.values
        foresight = yield from self._foresee(group, numbers, noises, values, values)
        group.release()
        pool, logs = foresight.pool, log_shares(foresight.advantages)
        labels = self._clusters(sequence, state, foresight, _LAST_CLUSTERS) if len(pool) else None
        if labels is not None:
            pool = pool[labels == np.bincount(labels).argmax()]
        members = pool if len(pool) else np.arange(self.width)
        [drawn] = self._draw(sequence, state, _CHOICE, logs[members], 1)
        answer = int(members[drawn])
        order = sorted(numbers, key=lambda i: (i != answer, -foresight.values[i]))
        texts: dict[tuple[int, ...], RankedText] = {}
        for number in order:
            one = foresight.rollouts[number]
            text = RankedText(foresight.values[number], one.tokens, one.logprobs)
            texts.setdefault(tuple(one.tokens), text)
        emit_ranked(sequence, list(texts.values()))

    def _draw(
        self, sequence: Sequence, state: Beams, purpose: int, logs: np.ndarray, count: int
    ) -> list[int]:
        """`count` different indices in proportion to the exponentials of `logs`: those with the
        largest sums with Gumbel noise."""
        noise = self._random(sequence).gumbel(range(len(logs)), state.num_rounds, purpose)
        return [int(number) for number in np.argsort(-(logs + noise))[:count]]

    @staticmethod
    def _random(sequence: Sequence) -> Noise:
        return sequence.noise.with_purpose("resample")

    @staticmethod
    def _noises(sequence: Sequence, first: int, count: int) -> list[Noise]:
        """The random numbers of texts `first` and following."""
        return [sequence.noise.forked(1 + first + number) for number in range(count)]


def _means(group: Rollouts, begins: list[tuple[float, float]]) -> list[float]:
    """The mean log-probability of the tokens of every rollout's step.

    Args:
        group: The rollouts.
        begins: Of each the sum of the log-probabilities of the tokens before the step, and the
            value of a step without tokens.
    """
    return [
        (one.total - total) / (len(one.tokens) - one.start) if len(one.tokens) > one.start else mean
        for one, (total, mean) in zip(group.rollouts, begins, strict=True)
    ]


def log_shares(values: np.ndarray) -> np.ndarray:
    """The logarithm of the softmax of values divided by `SHARPNESS`, float64 `[values]`."""
    if not len(values):
        return values
    scaled = (values - values.max()) / SHARPNESS
    shares: np.ndarray = scaled - np.log(np.exp(scaled).sum())
    return shares
