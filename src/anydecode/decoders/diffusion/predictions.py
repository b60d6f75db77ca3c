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
from anydecode.sampling.policy import Policy
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence


class Facts:
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
        policy: Policy,
        step: int,
        mask: int,
        tempered: bool = False,
        rows: range | None = None,
    ) -> None:
        self.sequence = sequence
        self.scores = scores
        self.policy = policy
        self.step = step
        self.mask = mask
        if not scores.logits.flags.writeable:
            scores.logits = scores.logits.copy()
        scores.logits[:, mask] = -np.inf
        rows = range(len(scores)) if rows is None else rows
        self._rows = {int(scores.positions[row]): row for row in rows}
        tempered = tempered and not policy.is_greedy
        self._plain = policy if tempered else Policy(1.0, policy.before)
        self._adjust: list[Callable[[int, np.ndarray], np.ndarray]] = []
        self._changed: dict[int, np.ndarray] = {}
        self._tokens: dict[int, int] = {}
        self._facts: dict[int, Facts] = {}
        self._sure: dict[int, float] = {}

    def __contains__(self, place: int) -> bool:
        return int(place) in self._rows

    @property
    def places(self) -> np.ndarray:
        """The positions that were predicted, in the order of the rows."""
        return np.fromiter(self._rows, np.int64)

    def keep(self) -> Predictions:
        """Copy what the lane's next pass would overwrite."""
        self.scores.keep()
        self._facts.clear()  # they may still be computing from the old rows
        return self

    def adjust(self, change: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """Let `change(place, logits)` give the logits that everything else is computed from; it
        must not write to its argument. Call before anything is asked for."""
        self._adjust.append(change)

    def revise(self, place: int) -> None:
        """What was adjusted at `place` has changed: compute it anew when it is asked for."""
        for known in (self._changed, self._tokens, self._facts, self._sure):
            known.pop(place, None)

    def logits(self, place: int) -> np.ndarray:
        """float32 `[vocab_size]` for the token at `place`; the mask token has -inf."""
        place = int(place)
        row = self.scores.row(self._rows[place])
        if not self._adjust:
            return row
        if place not in self._changed:
            for change in self._adjust:
                row = change(place, row)
            self._changed[place] = row
        return self._changed[place]

    def probabilities(self, place: int) -> np.ndarray:
        """float64 `[vocab_size]`: the un-noised distribution at `place`."""
        logits = self.logits(place)
        return self._plain.distribution(logits).dense(len(logits))

    def token(self, place: int) -> int:
        """What the policy draws for `place`, with the noise of the place and of this step."""
        place = int(place)
        if place not in self._tokens:
            self._tokens[place] = self.draw(self.policy, place)
        return self._tokens[place]

    def draw(self, policy: Policy, place: int) -> int:
        """What `policy` draws for `place`."""
        return self.sequence.pick(policy, self.logits(place), int(place), self.step)

    def facts(self, place: int) -> Facts:
        """The un-noised distribution at `place` in numbers."""
        place = int(place)
        if place not in self._facts:
            self._facts[place] = Facts(*self._untempered(place))
        return self._facts[place]

    def chance(self, place: int, token: int) -> float:
        """The un-noised probability of `token` at `place`."""
        scores, tokens = self._untempered(int(place))
        return self.facts(place).chance(Distribution(tokens, scores).score(token))

    def _untempered(self, place: int) -> tuple[np.ndarray, np.ndarray | None]:
        if self._plain.is_plain and self._plain.temperature == 1:
            return self.logits(place), None
        found = self._plain.distribution(self.logits(place))
        return found.scores, found.tokens

    def tokens(self, places: Iterable[int]) -> np.ndarray:
        """int32: `token` of each place."""
        return np.array([self.token(place) for place in places], np.int32)

    def confidence(self, places: Iterable[int]) -> np.ndarray:
        """float64: the un-noised probability of each place's token."""
        return np.array([self._confidence(int(place)) for place in places], np.float64)

    def margins(self, places: Iterable[int]) -> np.ndarray:
        """float64: the largest probability less the second."""
        return np.array([self.facts(place).margin for place in places], np.float64)

    def entropies(self, places: Iterable[int]) -> np.ndarray:
        """float64: nats."""
        return np.array([self.facts(place).entropy for place in places], np.float64)

    def _confidence(self, place: int) -> float:
        if place not in self._sure:
            token, facts = self.token(place), self.facts(place)
            same = token == facts.best
            self._sure[place] = facts.probability if same else self.chance(place, token)
        return self._sure[place]
