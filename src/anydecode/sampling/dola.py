"""DoLa: decoding by contrasting layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anydecode.sampling.truncation import log_probabilities


@dataclass(frozen=True)
class DoLa:
    """ln p(last layer) - ln p(early layer) over tokens at least `relative_top` times as probable as
    the best; the others are forbidden. The early layer is the one of `taps` whose distribution has
    the largest Jensen-Shannon divergence from the last (Chuang et al., 2023, arXiv 2309.03883);
    ties fall to the lower layer.
    """

    taps: tuple[int, ...]
    relative_top: float = 0.1

    companions: ClassVar[int] = 0

    def combine(
        self, logits: np.ndarray, companions: list[np.ndarray], taps: dict[int, np.ndarray]
    ) -> np.ndarray:
        """float32 `[vocab_size]`, -inf where forbidden."""
        last, p = log_probabilities(logits)
        early = {layer: log_probabilities(taps[layer]) for layer in sorted(self.taps)}
        layer = max(early, key=lambda layer: divergence(last, p, *early[layer]))
        allowed = last >= last.max() + np.float32(np.log(self.relative_top))
        row: np.ndarray = np.where(allowed, last - early[layer][0], np.float32(-np.inf))
        return row


def divergence(log_p: np.ndarray, p: np.ndarray, log_q: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon divergence in nats."""
    middle = np.logaddexp(log_p, log_q) - np.float32(np.log(2))
    return 0.5 * float(
        (p * (log_p - middle)).sum(dtype=np.float64) + (q * (log_q - middle)).sum(dtype=np.float64)
    )
