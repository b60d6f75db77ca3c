"""Classifier-free guidance for language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Guidance:
    """without + scale * (with - without), where "with" are the logits behind the prompt and
    "without" those behind the companion's prompt (Sanchez et al., "Stay on topic with
    classifier-free guidance", 2023, arXiv 2306.17806). 1 changes nothing.

    Taken on logits: on log-probabilities the row would differ by one constant, which no
    distribution sees.
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
        """float32 `[vocab_size]`."""
        without = companions[0]
        row: np.ndarray = without + np.float32(self.scale) * (logits - without)
        return row
