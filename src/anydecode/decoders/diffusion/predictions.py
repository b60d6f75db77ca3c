"""The predictions of one forward pass over a canvas: per position a token and its confidence.

Every number is computed lazily and from its own row alone, so it is bit-identical whatever else is
in the pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence


class RowStatistics:
    """Statistics of one position's distribution before sampling noise (float64, natural log).

    Each is computed on first use.

    Args:
        scores: Logits, float32 `[tokens]`.
        tokens: The token of each score, int `[tokens]` (default: the index).
    """

    def __init__(self, scores: np.ndarray, tokens: np.ndarray | None = None) -> None:
        self._scores = scores
        self._argmax = int(scores.argmax())
        #: The most likely token.
        self.best = self._argmax if tokens is None else int(tokens[self._argmax])
        #: The largest score.
        self.top = float(scores[self._argmax])

    @cached_property
    def _exponentials(self) -> tuple[np.ndarray, float]:
        return exponentials(self._scores)

    @property
    def probability(self) -> float:
        """The probability of the most likely token."""
        return 1 / self._exponentials[1]

    @cached_property
    def gap(self) -> float:
        """The largest score minus the second largest."""
        if len(self._scores) == 1:
            return math.inf
        return self.top - float(np.partition(self._scores, -2)[-2])

    @property
    def margin(self) -> float:
        """The largest probability minus the second largest."""
        return -math.expm1(-self.gap) / self._exponentials[1]

    @cached_property
    def entropy(self) -> float:
        """The entropy in nats."""
        weights, total = self._exponentials
        below = np.subtract(self._scores, self.top, dtype=np.float64)
        below[weights == 0] = 0.0
        return max(0.0, math.log(total) - float(np.sum(weights * below)) / total)

    def probability_of(self, score: float) -> float:
        """The probability of a token with the given score."""
        return math.exp(score - self.top) / self._exponentials[1]


class Predictions:
    """The predictions of one forward pass over a canvas, by position.

    Confidences are probabilities under the softmax of the logits, after bans and biases. The mask
    token is never predicted. The object is valid until the decoder yields again, unless `keep` is
    called.

    Args:
        sequence: The sequence of the canvas.
        scores: The result of the pass.
        sampler: The sampler that samples the tokens; it must not be stateful.
        step: The denoising step, which selects the sampling noise.
        mask: The mask token, or -1 if there is none.
        tempered: Take confidences from the distribution after temperature and truncation.
        rows: The rows of `scores` that belong to this canvas (default: all).
        banned: Further tokens that are never predicted.
    """

    def __init__(
        self,
        sequence: Sequence,
        scores: Scores,
        sampler: Sampler,
        step: int,
        mask: int,
        tempered: bool = False,
        rows: range | None = None,
        banned: Iterable[int] = (),
    ) -> None:
        self.sequence = sequence
        self.scores = scores
        self.sampler = sampler
        self.step = step
        self.mask = mask
        if not scores.logits.flags.writeable:
            scores.keep()
        scores.logits[:, [token for token in (mask, *banned) if token >= 0]] = -np.inf
        rows = range(len(scores)) if rows is None else rows
        self._rows = {int(scores.positions[row]): row for row in rows}
        tempered = tempered and not sampler.is_greedy
        self._confidence_sampler = sampler if tempered else Sampler(1.0, sampler.pre_temperature)
        self._adjustments: list[Callable[[int, np.ndarray], np.ndarray]] = []
        self._adjusted: dict[int, np.ndarray] = {}
        self._tokens: dict[int, int] = {}
        self._statistics: dict[int, RowStatistics] = {}
        self._confidences: dict[int, float] = {}

    def __contains__(self, position: int) -> bool:
        return int(position) in self._rows

    @property
    def positions(self) -> np.ndarray:
        """The predicted positions, in the order of the rows."""
        return np.fromiter(self._rows, np.int64)

    def keep(self) -> Predictions:
        """Copy the logits, which the next pass of the model runner would overwrite."""
        self.scores.keep()
        self._statistics.clear()  # they may still refer to the old rows
        return self

    def adjust(self, adjustment: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """Compute everything from the logits that `adjustment(position, logits)` returns.

        The function must not write to its argument. Call this before anything is read.
        """
        self._adjustments.append(adjustment)

    def invalidate(self, position: int) -> None:
        """Discard everything computed for `position`, as its adjustment has changed."""
        for cached in (self._adjusted, self._tokens, self._statistics, self._confidences):
            cached.pop(position, None)

    def logits(self, position: int) -> np.ndarray:
        """The logits at `position`, float32 `[vocab_size]`; the mask token has -inf."""
        position = int(position)
        row = self.scores.row(self._rows[position])
        if not self._adjustments:
            return row
        if position not in self._adjusted:
            for adjustment in self._adjustments:
                row = adjustment(position, row)
            self._adjusted[position] = row
        return self._adjusted[position]

    def probabilities(self, position: int) -> np.ndarray:
        """The distribution at `position` before sampling noise, float64 `[vocab_size]`."""
        logits = self.logits(position)
        return self._confidence_sampler.distribution(logits).dense(len(logits))

    def token(self, position: int) -> int:
        """The token sampled for `position`, with the noise of the position and of this step."""
        position = int(position)
        if position not in self._tokens:
            self._tokens[position] = self.draw(self.sampler, position)
        return self._tokens[position]

    def draw(self, sampler: Sampler, position: int) -> int:
        """Sample the token of `position` with another sampler."""
        return self.sequence.sample(sampler, self.logits(position), int(position), self.step)

    def statistics(self, position: int) -> RowStatistics:
        """The statistics of the distribution at `position` before sampling noise."""
        position = int(position)
        if position not in self._statistics:
            self._statistics[position] = RowStatistics(*self._confidence_scores(position))
        return self._statistics[position]

    def probability_drawn(self, position: int, token: int) -> float:
        """The probability of `token` at `position` before sampling noise."""
        scores, tokens = self._confidence_scores(int(position))
        return self.statistics(position).probability_of(Distribution(tokens, scores).score(token))

    def probabilities_drawn(self, positions: Iterable[int], tokens: Iterable[int]) -> np.ndarray:
        """The probability of a token at each position before sampling noise, float64."""
        pairs = zip(positions, tokens, strict=True)
        return np.array([self.probability_drawn(*pair) for pair in pairs], np.float64)

    def _confidence_scores(self, position: int) -> tuple[np.ndarray, np.ndarray | None]:
        if (
            self._confidence_sampler.is_temperature_only
            and self._confidence_sampler.temperature == 1
        ):
            return self.logits(position), None
        distribution = self._confidence_sampler.distribution(self.logits(position))
        return distribution.scores, distribution.tokens

    def tokens(self, positions: Iterable[int]) -> np.ndarray:
        """The sampled token of each position, int32."""
        return np.array([self.token(position) for position in positions], np.int32)

    def confidence(self, positions: Iterable[int]) -> np.ndarray:
        """The confidence of each position: the probability of its token, float64."""
        return np.array([self._confidence(int(position)) for position in positions], np.float64)

    def margins(self, positions: Iterable[int]) -> np.ndarray:
        """The largest probability minus the second largest of each position, float64."""
        return np.array([self.statistics(position).margin for position in positions], np.float64)

    def entropies(self, positions: Iterable[int]) -> np.ndarray:
        """The entropy of each position in nats, float64."""
        return np.array([self.statistics(position).entropy for position in positions], np.float64)

    def _confidence(self, position: int) -> float:
        if position not in self._confidences:
            token, statistics = self.token(position), self.statistics(position)
            is_best = token == statistics.best
            self._confidences[position] = (
                statistics.probability if is_best else self.probability_drawn(position, token)
            )
        return self._confidences[position]
