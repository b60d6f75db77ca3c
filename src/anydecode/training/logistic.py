"""Logistic regression."""

from __future__ import annotations

import numpy as np

#: Steps of Newton's method.
_STEPS = 100


def fit_logistic(
    inputs: np.ndarray, labels: np.ndarray, penalty: float, *, is_balanced: bool = False
) -> tuple[np.ndarray, float]:
    """The weights `[features]` and the bias of a logistic regression, by Newton's method.

    Args:
        inputs: float64 `[rows, features]`.
        labels: bool `[rows]`, some of each kind.
        penalty: Of half the squared length of the weights.
        is_balanced: Whether both kinds weigh the same in sum.
    """
    count, columns = len(labels), np.column_stack([inputs, np.ones(len(labels))])
    weights = np.ones(count)
    if is_balanced:
        weights = np.where(labels, count / (2 * labels.sum()), count / (2 * (~labels).sum()))
    penalties = np.append(np.full(inputs.shape[1], penalty), 0.0)
    solution = np.zeros(columns.shape[1])
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(columns @ solution, -500, 500)))
        gradient = columns.T @ (weights * (p - labels)) + penalties * solution
        curvature = columns.T @ (columns * (weights * p * (1 - p))[:, None]) + np.diag(penalties)
        step = np.linalg.solve(curvature + 1e-12 * np.eye(len(solution)), gradient)
        solution = solution - step
        if np.abs(step).max() < 1e-10:
            break
    return solution[:-1], float(solution[-1])
