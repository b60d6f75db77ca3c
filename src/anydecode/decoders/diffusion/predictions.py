"""What a pass says of the masks: per position a token, how sure the model is, and what else a
policy may rank by. Computed when asked for, row by row, so that a position's numbers are the same
bits whatever else is in the pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from anydecode.sampling.candidates import Distribution, exponentials
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence


class RowStatistics:
    """One position under the un-noised distribution, in numbers (float64, natural logarithms).
    Each is computed when it is first asked for."""

    def __init__(self, scores: np.ndarray, tokens: np.ndarray | None = None) -> None:
        self._scores = scores
        self._at = int(scores.argmax())
        #: The most likely token.
        self.best = self._at if tokens is None else int(tokens[self._at])
        #: The largest score.
        self.top = float(scores[self._at])

    @cached_property
    def _exponentials(self) -> tuple[np.ndarray, float]:
        return exponentials(self._scores)

    @property
    def probability(self) -> float:
        """Of the most likely token."""
        return 1 / self._exponentials[1]

    @cached_property
    def gap(self) -> float:
        """The largest score less the second."""
        if len(self._scores) == 1:
            return math.inf
        return self.top - float(np.partition(self._scores, -2)[-2])

    @property
    def margin(self) -> float:
        """The largest probability less the second."""
        return -math.expm1(-self.gap) / self._exponentials[1]

    @cached_property
    def entropy(self) -> float:
        """In nats."""
        weights, total = self._exponentials
        below = np.subtract(self._scores, self.top, dtype=np.float64)
        below[weights == 0] = 0.0
        return max(0.0, math.log(total) - float(np.sum(weights * below)) / total)

    def chance(self, score: float) -> float:
        """The probability of a token with this score."""
        return math.exp(score - self.top) / self._exponentials[1]


class Predictions:
    """The answers of one pass over a canvas, by position.

    Confidences come from the softmax of the logits, after whatever bans or biases them; `tempered`
    takes them from what the policy draws from (temperature and truncations applied). The mask token
    is never predicted. `rows` are this canvas's among the scores'. Valid until the decoder yields
    again, unless kept.
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
    ) -> None:
        self.sequence = sequence
        self.scores = scores
        self.sampler = sampler
        self.step = step
        self.mask = mask
        if not scores.logits.flags.writeable:
            scores.logits = scores.logits.copy()
        scores.logits[:, mask] = -np.inf
        rows = range(len(scores)) if rows is None else rows
        self._rows = {int(scores.positions[row]): row for row in rows}
        tempered = tempered and not sampler.is_greedy
        self._plain = sampler if tempered else Sampler(1.0, sampler.pre_temperature)
        self._adjust: list[Callable[[int, np.ndarray], np.ndarray]] = []
        self._changed: dict[int, np.ndarray] = {}
        self._tokens: dict[int, int] = {}
        self._facts: dict[int, RowStatistics] = {}
        self._sure: dict[int, float] = {}

    def __contains__(self, position: int) -> bool:
        return int(position) in self._rows

    @property
    def positions(self) -> np.ndarray:
        """The positions that were predicted, in the order of the rows."""
        return np.fromiter(self._rows, np.int64)

    def keep(self) -> Predictions:
        """Copy what the lane's next pass would overwrite."""
        self.scores.keep()
        self._facts.clear()  # they may still be computing from the old rows
        return self

    def adjust(self, change: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """Let `change(position, logits)` give the logits that everything else is computed from; it
        must not write to its argument. Call before anything is asked for."""
        self._adjust.append(change)

    def revise(self, position: int) -> None:
        """What was adjusted at `position` has changed: compute it anew when it is asked for."""
        for known in (self._changed, self._tokens, self._facts, self._sure):
            known.pop(position, None)

    def logits(self, position: int) -> np.ndarray:
        """float32 `[vocab_size]` for the token at `position`; the mask token has -inf."""
        position = int(position)
        row = self.scores.row(self._rows[position])
        if not self._adjust:
            return row
        if position not in self._changed:
            for change in self._adjust:
                row = change(position, row)
            self._changed[position] = row
        return self._changed[position]

    def probabilities(self, position: int) -> np.ndarray:
        """float64 `[vocab_size]`: the un-noised distribution at `position`."""
        logits = self.logits(position)
        return self._plain.distribution(logits).dense(len(logits))

    def token(self, position: int) -> int:
        """What the policy draws for `position`, with the noise of the place and of this step."""
        position = int(position)
        if position not in self._tokens:
            self._tokens[position] = self.draw(self.sampler, position)
        return self._tokens[position]

    def draw(self, sampler: Sampler, position: int) -> int:
        """What `policy` draws for `position`."""
        return self.sequence.sample(sampler, self.logits(position), int(position), self.step)

    def facts(self, position: int) -> RowStatistics:
        """The un-noised distribution at `position` in numbers."""
        position = int(position)
        if position not in self._facts:
            self._facts[position] = RowStatistics(*self._untempered(position))
        return self._facts[position]

    def probability_drawn(self, position: int, token: int) -> float:
        """The un-noised probability of `token` at `position`."""
        scores, tokens = self._untempered(int(position))
        return self.facts(position).chance(Distribution(tokens, scores).score(token))

    def _untempered(self, position: int) -> tuple[np.ndarray, np.ndarray | None]:
        if self._plain.is_temperature_only and self._plain.temperature == 1:
            return self.logits(position), None
        found = self._plain.distribution(self.logits(position))
        return found.scores, found.tokens

    def tokens(self, positions: Iterable[int]) -> np.ndarray:
        """int32: `token` of each place."""
        return np.array([self.token(position) for position in positions], np.int32)

    def confidence(self, positions: Iterable[int]) -> np.ndarray:
        """float64: the un-noised probability of each place's token."""
        return np.array([self._confidence(int(position)) for position in positions], np.float64)

    def margins(self, positions: Iterable[int]) -> np.ndarray:
        """float64: the largest probability less the second."""
        return np.array([self.facts(position).margin for position in positions], np.float64)

    def entropies(self, positions: Iterable[int]) -> np.ndarray:
        """float64: nats."""
        return np.array([self.facts(position).entropy for position in positions], np.float64)

    def _confidence(self, position: int) -> float:
        if position not in self._sure:
            token, facts = self.token(position), self.facts(position)
            same = token == facts.best
            self._sure[position] = (
                facts.probability if same else self.probability_drawn(position, token)
            )
        return self._sure[position]
