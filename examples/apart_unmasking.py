"""An unmasking policy outside the package: confident masks, but no two close to each other.

Tokens that are filled in the same pass do not see each other, and neighbours depend on each other
most.

    anydecode generate --model tiny-diffusion --decoder apart --prompt "sort Leo Ada Ben:"
    anydecode certify apart_unmasking:apart
"""

from __future__ import annotations

import numpy as np

from anydecode import (
    Canvas,
    Card,
    Denoiser,
    InvalidRequestError,
    Predictions,
    UnmaskPolicy,
    register,
)


class ApartUnmasking(UnmaskPolicy):
    """Unmasks masks with a rank of at least `threshold`, best first, unless one within `distance`
    positions is unmasked in the same pass."""

    def __init__(self, threshold: float, distance: int) -> None:
        if distance < 0:
            raise InvalidRequestError(f"distance must be at least 0, not {distance}")
        self.threshold, self.distance = threshold, distance

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        chosen = np.zeros(len(positions), bool)
        for index in np.argsort(-ranks, kind="stable"):
            if ranks[index] < self.threshold:
                break
            distances = np.abs(positions[chosen] - positions[index])
            chosen[index] = not (distances <= self.distance).any()
        return chosen


@register(
    Card(
        "apart",
        "diffusion",
        paper="an example",
        exactness="lossy",
        summary="Fills confident masks, but no two close to each other in one pass.",
        needs=("diffusion model",),
    )
)
def apart(threshold: float = 0.9, distance: int = 1) -> Denoiser:
    """Denoises the whole canvas with `ApartUnmasking`.

    Args:
        threshold: Masks with at least this confidence may be filled.
        distance: Two masks filled in one pass are further apart than this.
    """
    return Denoiser(unmask=ApartUnmasking(threshold, distance))
