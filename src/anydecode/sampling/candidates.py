"""The tokens that may still be said, with their scores, and the distribution they make.

Scores are logits, or logits over the temperature. Survivors keep their token ids, so the noise of
a token is the same whatever was cut around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anydecode.errors import ConstraintError

if TYPE_CHECKING:
    from anydecode.scoring.noise import Noise


@dataclass(slots=True, eq=False)
class Candidates:
    """`tokens` int32 ascending, or None for the whole vocabulary; `scores` float32 of the same
    length. `owned`: the scores may be written to. `masked`: some may be -inf (forbidden)."""

    tokens: np.ndarray | None
    scores: np.ndarray
    owned: bool = False
    masked: bool = False

    def __len__(self) -> int:
        return len(self.scores)

    def writable(self) -> np.ndarray:
        """The scores, copied first if they belong to someone else."""
        if not self.owned:
            self.scores = self.scores.copy()
            self.owned = True
        return self.scores

    def keep(self, index: np.ndarray) -> Candidates:
        """The candidates at `index` (ascending places among these)."""
        tokens = index.astype(np.int32) if self.tokens is None else self.tokens[index]
        return Candidates(tokens, self.scores[index], True, self.masked)

    def allowed(self) -> Candidates:
        """The same without what is forbidden. Raises if nothing is left."""
        if not self.masked:
            return self
        index = np.flatnonzero(self.scores > -np.inf)
        if not len(index):
            raise ConstraintError("no token is allowed here: bans and constraint leave none")
        kept = self if len(index) == len(self) else self.keep(index)
        kept.masked = False
        return kept

    def positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where `ids` (no duplicates) stand among these: places, and which of `ids` were found."""
        if self.tokens is None:
            return ids, np.arange(len(ids))
        at = np.searchsorted(self.tokens, ids)
        found = np.flatnonzero(at < len(self.tokens))
        found = found[self.tokens[at[found]] == ids[found]]
        return at[found], found

    def argmax(self) -> int:
        """The token with the highest score, the lowest id among equals."""
        position = int(self.scores.argmax())
        if self.masked and self.scores[position] == -np.inf:
            raise ConstraintError("no token is allowed here: bans and constraint leave none")
        return position if self.tokens is None else int(self.tokens[position])


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a policy draws from: softmax of `scores` over `tokens`.

    `tokens` is int32 ascending, or None for the whole vocabulary; `scores` is float32, logit / T.
    """

    tokens: np.ndarray | None
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def probabilities(self) -> np.ndarray:
        """float64 `[len(tokens)]`, summing to one."""
        weights, total = exponentials(self.scores)
        return weights.astype(np.float64) / total

    def score(self, token: int) -> float:
        """The token's score; -inf if it is not among the tokens."""
        if self.tokens is None:
            return float(self.scores[token])
        position = int(np.searchsorted(self.tokens, token))
        if position == len(self.tokens) or self.tokens[position] != token:
            return -np.inf
        return float(self.scores[position])

    def log_probability(self, token: int) -> float:
        """Natural logarithm of the token's probability; -inf if it is not among the tokens."""
        return self.score(token) - log_sum_exp(self.scores)

    def dense(self, vocab_size: int) -> np.ndarray:
        """Probabilities of the whole vocabulary, float64 `[vocab_size]`."""
        if self.tokens is None:
            return self.probabilities()
        result = np.zeros(vocab_size)
        result[self.tokens] = self.probabilities()
        return result

    def sample(self, noise: Noise, position: int, attempt: int = 0) -> int:
        """argmax of score + Gumbel noise, ties to the lowest id: a draw from this distribution."""
        if len(self.scores) == 1:
            return 0 if self.tokens is None else int(self.tokens[0])
        ids = range(len(self.scores)) if self.tokens is None else self.tokens
        index = _best_key(self.scores, noise.uniform(ids, position, attempt))
        return index if self.tokens is None else int(self.tokens[index])


def _best_key(scores: np.ndarray, uniform: np.ndarray) -> int:
    """argmax of score - log(-log(uniform)), with logarithms only where they can matter.

    A token whose score is at most `edge` needs noise of at least `key - edge` to win, where `key`
    is the best key above the edge; comparing uniform numbers with one bound rules nearly all out.
    """
    if len(scores) <= 256:
        return int((scores - np.log(-np.log(uniform))).argmax())
    edge = scores.max() - np.float32(4)
    close = scores > edge
    key = (scores[close] - np.log(-np.log(uniform[close]))).max()
    bound = np.exp(-np.exp(float(edge) - key)) - 1e-9
    index = np.flatnonzero(close | (uniform >= bound))
    keys = scores[index] - np.log(-np.log(uniform[index]))
    return int(index[keys.argmax()])


def exponentials(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """exp(score - max) in float32, and their sum in float64.

    One contiguous row at a time: the order of summation then depends on its length alone, never on
    what else is in the batch.
    """
    weights = np.subtract(scores, scores.max())
    np.exp(weights, out=weights)
    return weights, float(weights.sum(dtype=np.float64))


def log_sum_exp(scores: np.ndarray) -> float:
    """log(sum(exp(scores))), to about 1e-7."""
    _, total = exponentials(scores)
    return float(scores.max()) + float(np.log(total))


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest scores, ascending; among equals the lowest places."""
    size = len(scores)
    if count >= size:
        return np.arange(size)
    bound = np.partition(scores, size - count)[size - count]
    index = np.flatnonzero(scores >= bound)
    surplus = len(index) - count
    if surplus:
        at_bound = np.flatnonzero(scores[index] == bound)
        index = np.delete(index, at_bound[len(at_bound) - surplus :])
    return index


def descending(scores: np.ndarray) -> np.ndarray:
    """Places by falling score; among equals the lowest place first."""
    return np.argsort(-scores, kind="stable")
