"""The contrast of two distributions within a plausible set, which DoLa and contrastive decoding
share."""

from __future__ import annotations

import numpy as np

from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor

#: Offset in nats that puts implausible tokens below all others.
BELOW = np.float32(1e4)


def contrasted(
    expert: np.ndarray, amateur: np.ndarray, ratio: float, weight: float = 1.0
) -> np.ndarray:
    """`expert - weight * amateur` for tokens at least `ratio` times as probable as the best one of
    the expert; the others get `expert - BELOW`, and `Plausible` drops them.

    Args:
        expert: Log-probabilities float32 `[vocab_size]`.
        amateur: The same of the other distribution.
        ratio: Minimum probability of a token relative to the best one.
        weight: The factor of the amateur.
    """
    allowed = expert >= expert.max() + np.float32(np.log(ratio))
    row: np.ndarray = np.where(allowed, expert - np.float32(weight) * amateur, expert - BELOW)
    return row


class Plausible(LogitsProcessor):
    """Drops the tokens that `contrasted` marked as implausible. It comes after the constraint: if
    the constraint allows only implausible tokens, the expert decides among them."""

    def apply(self, candidates: Candidates) -> Candidates:
        candidates = candidates.allowed()
        return candidates.keep(
            np.flatnonzero(candidates.scores >= candidates.scores.max() - BELOW / 2)
        )
