"""Log-probabilities of generated tokens and of their alternatives.

Each row is summed separately, contiguous and in a fixed order (see `exponentials`), so the numbers
do not depend on the batch of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.sampling.candidates import Distribution, descending, largest, log_sum_exp

#: Maximum number of alternatives per token.
MAX_ALTERNATIVES = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position.

    Attributes:
        token: The generated token.
        logprob: Its log-probability.
        top: The most probable tokens with their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token: int, count: int = 0) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `count` most probable tokens under the softmax of
    unmodified logits `[vocab_size]`."""
    return distribution_logprobs(Distribution(None, logits), token, count)


def distribution_logprobs(distribution: Distribution, token: int, count: int = 0) -> TokenLogprobs:
    """The same under the distribution that the sampler used; -inf for a token that it dropped."""
    scores = np.ascontiguousarray(distribution.scores)
    total = log_sum_exp(scores)
    positions = largest(scores, count) if count else np.empty(0, np.int64)
    positions = positions[descending(scores[positions])]
    tokens = positions if distribution.tokens is None else distribution.tokens[positions]
    top = zip(tokens.tolist(), (scores[positions].astype(np.float64) - total).tolist(), strict=True)
    return TokenLogprobs(token, distribution.score(token) - total, tuple(top))
