"""Windows of similar neighbours in a grid of patches (MustDrop, Liu et al., arXiv:2411.10803)."""

from __future__ import annotations

import numpy as np

#: The side of a window, in patches.
WINDOW = 3


def similar_windows(rows: np.ndarray, side: int, alike: float) -> list[np.ndarray]:
    """The 3 x 3 windows whose mean pairwise cosine is at least `alike`, the most similar first.

    Args:
        rows: `[side * side, size]`, from left to right and from top to bottom. Patches on the right
            and at the bottom that fill no window are in none.
        side: The side of the grid.
        alike: See above.

    Returns:
        For each of these windows the indices of its rows, ascending.
    """
    grid = np.arange(side * side).reshape(side, side)
    found: list[tuple[float, np.ndarray]] = []
    for top in range(0, side - WINDOW + 1, WINDOW):
        for left in range(0, side - WINDOW + 1, WINDOW):
            window = grid[top : top + WINDOW, left : left + WINDOW].ravel()
            norms = np.linalg.norm(rows[window], axis=1, keepdims=True)
            unit = rows[window] / np.maximum(norms, 1e-12)
            cosines = unit @ unit.T
            count = len(window)
            mean = float(cosines.sum() - cosines.trace()) / (count * (count - 1))
            if mean >= alike:
                found.append((mean, window))
    return [window for _, window in sorted(found, key=lambda one: -one[0])]
