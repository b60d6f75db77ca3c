"""Log-linear laws: fits to a known law, with and without noise, and what cannot be fitted."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from anydecode.errors import InvalidRequestError
from anydecode.training.scaling_law import fit_law


def points(noise: float) -> list[dict[str, float]]:
    draw = np.random.default_rng(8).normal
    return [
        {"x": x, "y": y, "value": 2 - 0.5 * math.log(x) + 3 * math.log(y) + draw(0, noise)}
        for x, y in product((1.0, 2.0, 8.0), (1.0, 3.0, 5.0))
    ]


def test_a_known_law_is_recovered() -> None:
    law = fit_law(points(0.0), "value", ["x", "y"])
    assert law.intercept == pytest.approx(2)
    assert law.slopes == pytest.approx({"x": -0.5, "y": 3.0})
    assert law.r_squared == pytest.approx(1) and law.left_out_error == pytest.approx(0, abs=1e-9)
    assert law.predict({"x": math.e, "y": math.e**2}) == pytest.approx(2 - 0.5 + 6)
    assert str(law).startswith("2 -0.5 ln(x) +3 ln(y), R² 1.000, error at left-out points ")


def test_noise_lowers_r_squared() -> None:
    fits = [fit_law(points(noise), "value", ["x", "y"]) for noise in (0.1, 1.0)]
    small, large = (fit.r_squared or 0 for fit in fits)
    assert 0 < large < small < 1
    assert fits[0].slopes["y"] == pytest.approx(3, abs=0.5)
    # A fit is never better at points that it does not know.
    rms = math.sqrt(
        sum((fits[1].predict(p) - p["value"]) ** 2 for p in points(1.0)) / len(points(1.0))
    )
    assert (fits[1].left_out_error or 0) > rms


def test_equal_values_have_no_r_squared() -> None:
    law = fit_law([{"x": x, "value": 1.5} for x in (1.0, 2.0, 4.0)], "value", ["x"])
    assert law.r_squared is None and "R² undefined" in str(law)
    assert law.slopes["x"] == pytest.approx(0, abs=1e-12)


def test_a_point_that_alone_determines_a_coefficient_cannot_be_left_out() -> None:
    rows = [{"x": x, "value": v} for x, v in ((1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (2.0, 4.0))]
    law = fit_law(rows, "value", ["x"])
    assert law.left_out_error is None and "left-out" not in str(law)


@pytest.mark.parametrize("rows", [[1.0, 2.0], [3.0, 3.0, 3.0], []], ids=str)
def test_points_that_determine_no_law_are_refused(rows: list[float]) -> None:
    with pytest.raises(InvalidRequestError, match="a law of x needs more than 2 measurements"):
        fit_law([{"x": x, "value": 1.0} for x in rows], "value", ["x"])
