"""Log-probabilities of what was said and of what else could have been.

Each row is summed by itself, contiguous and in one fixed order (see `exponentials`), so the
numbers do not depend on the batch the row came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.sampling.candidates import Distribution, descending, largest, log_sum_exp

#: The most alternatives that may be asked for per token.
MOST_ALTERNATIVES = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms: of the token said, and of the most probable tokens in falling order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token: int, count: int = 0) -> TokenLogprobs:
    """`token` and the `count` most probable tokens under softmax of raw logits `[vocab_size]`."""
    return distribution_logprobs(Distribution(None, logits), token, count)


def distribution_logprobs(distribution: Distribution, token: int, count: int = 0) -> TokenLogprobs:
    """The same under what the policy drew from; -inf for a token it had cut."""
    scores = np.ascontiguousarray(distribution.scores)
    total = log_sum_exp(scores)
    positions = largest(scores, count) if count else np.empty(0, np.int64)
    positions = positions[descending(scores[positions])]
    tokens = positions if distribution.tokens is None else distribution.tokens[positions]
    top = zip(tokens.tolist(), (scores[positions].astype(np.float64) - total).tolist(), strict=True)
    return TokenLogprobs(token, distribution.score(token) - total, tuple(top))
