"""The masked positions of a step by descending score."""

from __future__ import annotations

from collections.abc import Callable

from anydecode.certification.denoising import StepState, entropy_nats, margin

SCORES: dict[str, Callable[[StepState, int], float]] = {
    "confidence": lambda m, i: m.confidence(i),
    "margin": lambda m, i: margin(m.probabilities[i]),
    "entropy": lambda m, i: -entropy_nats(m.probabilities[i]),
}


def order(state: StepState, name: str) -> list[int]:
    """The masked positions by descending score; ties go to the leftmost."""
    return sorted(state.probabilities, key=lambda i: (-SCORES[name](state, i), i))
