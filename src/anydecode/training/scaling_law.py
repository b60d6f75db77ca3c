"""Log-linear laws, fitted to measurements by least squares (Yan et al., "Scaling Laws for
Speculative Decoding", arXiv:2505.07858)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError


@dataclass(frozen=True)
class LogLinearLaw:
    """value = intercept + sum of slope * ln(variable).

    Attributes:
        intercept: See above.
        slopes: By variable.
        r_squared: Coefficient of determination. None: all values are equal.
        left_out_error: Root mean square of the errors at points that are left out of the fit, one
            at a time. None: one of them cannot be left out.
    """

    intercept: float
    slopes: Mapping[str, float]
    r_squared: float | None
    left_out_error: float | None

    def predict(self, point: Mapping[str, float]) -> float:
        """The value at a point, which has all variables."""
        slopes = self.slopes.items()
        return self.intercept + sum(slope * math.log(point[name]) for name, slope in slopes)

    def __str__(self) -> str:
        terms = "".join(f" {slope:+.4g} ln({name})" for name, slope in self.slopes.items())
        fit = "undefined" if self.r_squared is None else f"{self.r_squared:.3f}"
        text = f"{self.intercept:.4g}{terms}, R² {fit}"
        if self.left_out_error is None:
            return text
        return f"{text}, error at left-out points {self.left_out_error:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """The law as plain JSON."""
        return asdict(self)


def fit_law(
    points: Sequence[Mapping[str, float]], value: str, variables: Sequence[str]
) -> LogLinearLaw:
    """The law of least squares.

    Args:
        points: Measurements, which have all variables, above 0, and the value.
        value: What depends on them.
        variables: What it depends on.

    Raises:
        InvalidRequestError: There are no more points than coefficients, or the points do not
            determine these.
    """
    rows = [[1.0, *(math.log(point[name]) for name in variables)] for point in points]
    matrix, values = np.array(rows), np.array([point[value] for point in points], float)
    count = len(variables) + 1
    if len(points) <= count or np.linalg.matrix_rank(matrix) < count:
        raise InvalidRequestError(
            f"a law of {' and '.join(variables)} needs more than {count} measurements, with"
            f" different values of each; there are {len(points)}"
        )
    coefficients = np.linalg.lstsq(matrix, values, rcond=None)[0]
    errors = values - matrix @ coefficients
    spread = float(np.square(values - values.mean()).sum())
    q, _ = np.linalg.qr(matrix)
    freedom = 1 - np.square(q).sum(1)  # 0: the point alone determines a coefficient
    left_out = None
    if freedom.min() > 1e-9:
        left_out = float(np.sqrt(np.square(errors / freedom).mean()))
    return LogLinearLaw(
        float(coefficients[0]),
        dict(zip(variables, map(float, coefficients[1:]), strict=True)),
        1 - float(np.square(errors).sum()) / spread if spread else None,
        left_out,
    )
