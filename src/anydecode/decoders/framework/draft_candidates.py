"""The tokens that a draft considers behind a text, with the target's noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Distribution, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence

#: Number of most probable tokens of a draft distribution that are used; the rest is cut off.
NUM_CANDIDATES = 64


@dataclass(eq=False)
class DraftCandidates:
    """A draft model's candidates for the tokens after a node.

    `tokens` are in the order of draws without replacement. `probabilities` are float64 and sum to
    one. `keys`, in falling order, are log-probabilities plus the Gumbel noise at the position.
    Without noise this is the order of probability. There may be none.
    """

    tokens: np.ndarray
    probabilities: np.ndarray
    keys: np.ndarray

    def dense(self, size: int) -> np.ndarray:
        """The distribution over the vocabulary, float64 `[size]`."""
        row = np.zeros(size)
        row[self.tokens] = self.probabilities
        return row

    @property
    def acceptance_probabilities(self) -> np.ndarray:
        """The estimated probability that the target samples each token with this noise: softmax of
        the keys. It assumes that the target's logits differ from the draft model's by standard
        Gumbel errors."""
        weights: np.ndarray = np.exp(self.keys - self.keys[:1])
        weights /= weights.sum()
        return weights


def draft_candidates(
    sequence: Sequence,
    sampler: Sampler,
    row: np.ndarray,
    position: int,
    draw: int | None = None,
    has_noise: bool = True,
) -> DraftCandidates:
    """The candidates for the token at `position`.

    Args:
        sequence: The sequence to draft for.
        sampler: Its sampler, advanced by all tokens before.
        row: The draft's logits, float32 `[vocab_size]`, over the target's vocabulary.
        position: The position of the token.
        draw: The number of a draw with noise of its own, as rejection sampling requires; None: the
            target's noise.
        has_noise: False leaves the noise out.
    """
    try:
        distribution = draft_distribution(sampler, row)
    except ConstraintError:  # a head may have none, see `draft_token`
        none = np.empty(0)
        return DraftCandidates(none.astype(np.int64), none, none)
    tokens, scores = distribution.tokens, distribution.scores
    if len(scores) > NUM_CANDIDATES:
        indices = largest(scores, NUM_CANDIDATES)
        tokens, scores = indices if tokens is None else tokens[indices], scores[indices]
    ids = np.arange(len(scores)) if tokens is None else np.asarray(tokens, np.int64)
    shifted = scores.astype(np.float64) - float(scores.max())
    log_probabilities = shifted - np.log(np.exp(shifted).sum())
    keys = log_probabilities
    if has_noise and not sequence.sampler.is_greedy:
        noise = sequence.noise if draw is None else sequence.noise.with_purpose("draft")
        keys = log_probabilities + noise.gumbel(ids, position, draw or 0)
    order = np.argsort(-keys, kind="stable")
    return DraftCandidates(ids[order], np.exp(log_probabilities[order]), keys[order])


def draft_token(sequence: Sequence, sampler: Sampler, row: np.ndarray, position: int) -> int | None:
    """The token of a chain at `position`, with the target's noise. None if no token is allowed: a
    head may have fewer tokens than the target, and after the last head all logits are -inf.
    Arguments as for `draft_candidates`."""
    try:
        token = sequence.sample(sampler, row, position)
    except ConstraintError:
        return None
    return None if row[token] == -np.inf else token


def draft_distribution(sampler: Sampler, row: np.ndarray) -> Distribution:
    """The distribution that a tree drafts from: the sampler's; at temperature 0, where that is a
    single token, the distribution at temperature 1."""
    if sampler.is_greedy:
        return Sampler(1.0, sampler.pre_temperature).distribution(row)
    return sampler.distribution(row)


def fit_vocab(sequence: Sequence, row: np.ndarray) -> np.ndarray:
    """Truncate a draft model's row, float32, to the target's vocabulary size, or pad it with -inf.
    Models with the same tokenizer may pad their vocabularies to different sizes."""
    size = sequence.model().spec.vocab_size
    if len(row) >= size:
        return row[:size]
    padded = np.full(size, -np.inf, np.float32)
    padded[: len(row)] = row
    return padded
