"""Candidate tokens with their scores, and the distribution over them.

Scores are logits, or logits divided by the temperature. Candidates keep their token ids, so the
noise of a token does not depend on which other tokens were dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.kernels import portable
from anydecode.kernels.library import exponentials, gumbel, logsumexp, top_k

if TYPE_CHECKING:
    from anydecode.sampling.noise import Noise


@dataclass(slots=True, eq=False)
class Candidates:
    """Tokens that may come next.

    Args:
        tokens: int32 ids, ascending, or None for the whole vocabulary.
        scores: float32, one per token; -inf for a forbidden token, and for one that a draft model
            does not have.
        owned: Whether `scores` may be written to.
    """

    tokens: np.ndarray | None
    scores: np.ndarray
    owned: bool = False

    def __len__(self) -> int:
        return len(self.scores)

    def writable(self) -> np.ndarray:
        """The scores for writing; copied first if not `owned`."""
        if not self.owned:
            self.scores = self.scores.copy()
            self.owned = True
        return self.scores

    def keep(self, index: np.ndarray) -> Candidates:
        """The candidates at the indices `index` (ascending)."""
        tokens = index.astype(np.int32) if self.tokens is None else self.tokens[index]
        return Candidates(tokens, self.scores[index], owned=True)

    def allowed(self) -> Candidates:
        """The candidates without those of score -inf. Raises `ConstraintError` if none is left."""
        if self.scores.min() != -np.inf:
            return self
        index = np.flatnonzero(self.scores > -np.inf)
        if not len(index):
            raise ConstraintError("no token is allowed here: bans and constraint forbid all tokens")
        return self.keep(index)

    def without(self, token: int) -> Candidates:
        """The candidates without `token`, which is one of them."""
        if self.tokens is None:
            scores = self.scores.copy()
            scores[token] = -np.inf
            return Candidates(None, scores, owned=True)
        return self.keep(np.flatnonzero(self.tokens != token))

    def positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find token ids (no duplicates) among the candidates.

        Returns:
            The indices of those found, and which of `ids` they are.
        """
        if self.tokens is None:
            return ids, np.arange(len(ids))
        at = np.searchsorted(self.tokens, ids)
        found = np.flatnonzero(at < len(self.tokens))
        found = found[self.tokens[at[found]] == ids[found]]
        return at[found], found

    def argmax(self) -> int:
        """The token with the highest score, ties to the lowest id."""
        position = int(self.scores.argmax())
        if self.scores[position] == -np.inf:
            raise ConstraintError("no token is allowed here: bans and constraint forbid all tokens")
        return position if self.tokens is None else int(self.tokens[position])


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution that a sampler samples from: softmax of `scores` over `tokens`.

    Args:
        tokens: int32 ids, ascending, or None for the whole vocabulary.
        scores: float32, one per token: logit / temperature.
    """

    tokens: np.ndarray | None
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def probabilities(self) -> np.ndarray:
        """Probabilities float64 `[len(tokens)]`, with sum 1."""
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

    def most_probable(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most probable tokens, fewer where others have probability 0.

        Returns:
            Token ids int32 and log-probabilities float64, in descending order; ties to the lowest
            id.
        """
        index, scores = (rows[0] for rows in top_k(self.scores[np.newaxis], count))
        index, scores = index[scores > -np.inf], scores[scores > -np.inf]
        ids = index if self.tokens is None else self.tokens[index]
        return ids, scores.astype(np.float64) - logsumexp(self.scores)

    def dense(self, vocab_size: int) -> np.ndarray:
        """Probabilities of the whole vocabulary, float64 `[vocab_size]`."""
        if self.tokens is None:
            return self.probabilities()
        result = np.zeros(vocab_size)
        result[self.tokens] = self.probabilities()
        return result

    def sample(self, noise: Noise, position: int, attempt: int = 0) -> int:
        """Sample a token: argmax of score + Gumbel noise, ties to the lowest id."""
        if len(self.scores) == 1:
            return 0 if self.tokens is None else int(self.tokens[0])
        ids = range(len(self.scores)) if self.tokens is None else self.tokens
        index = _best_key(self.scores, noise.uniform(ids, position, attempt))
        return index if self.tokens is None else int(self.tokens[index])


def _best_key(scores: np.ndarray, uniform: np.ndarray) -> int:
    """argmax of score - log(-log(uniform)), computing logarithms only for possible winners.

    A token whose score is at most `edge` needs noise of at least `key - edge` to win, where `key`
    is the best key above the edge; comparing uniform numbers with one bound excludes nearly all.
    """
    if len(scores) <= 256:
        return int((scores + gumbel(uniform)).argmax())
    edge = scores.max() - np.float32(4)
    close = scores > edge
    key = (scores[close] + gumbel(uniform[close])).max()
    bound = np.exp(-np.exp(float(edge) - key)) - 1e-9
    index = np.flatnonzero(close | (uniform >= bound))
    keys = scores[index] + gumbel(uniform[index])
    return int(index[keys.argmax()])


def log_sum_exp(scores: np.ndarray) -> float:
    """log(sum(exp(scores))), accurate to about 1e-7."""
    _, total = exponentials(scores)
    return float(scores.max()) + float(portable.log(total))


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest scores, ascending; ties to the lowest indices."""
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
    """Indices in order of descending score; ties to the lowest index first."""
    return np.argsort(-scores, kind="stable")
