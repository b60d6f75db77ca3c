"""Classifier-free guidance for language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Guidance:
    """Logits l' + scale * (l - l'), where l are the logits after the prompt and l' those after the
    companion prompt (Sanchez et al., "Stay on topic with classifier-free guidance", 2023, arXiv
    2306.17806). A scale of 1 changes nothing.

    Computed from logits: with log-probabilities the row would differ by a constant, which does not
    change the distribution.
    """

    scale: float

    companions: ClassVar[int] = 1
    capture_layers: ClassVar[tuple[int, ...]] = ()

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """The guided row, float32 `[vocab_size]`."""
        unguided = companions[0]
        row: np.ndarray = unguided + np.float32(self.scale) * (logits - unguided)
        return row
