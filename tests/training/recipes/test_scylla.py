"""Laws of draft models: their certificate, and mistakes that it rejects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import catalogue
from anydecode.errors import InvalidRequestError
from anydecode.training import scaling, scaling_law
from certificates import assert_certified, assert_rejected

fit_law, recommend = scaling_law.fit_law, scaling.recommend


def test_certificate() -> None:
    assert_certified("scylla")


def linear_in_the_variables(points: Any, value: str, variables: Any) -> Any:
    """A law without logarithms."""
    straight = [{**p, **{name: math.exp(p[name] / 1e7) for name in variables}} for p in points]
    return fit_law(straight, value, variables)


def r_squared_of_one(points: Any, value: str, variables: Any) -> Any:
    return replace(fit_law(points, value, variables), r_squared=1.0)


def errors_at_fitted_points(points: Any, value: str, variables: Any) -> Any:
    """The error of the fit for the error at left-out points."""
    law = fit_law(points, value, variables)
    squares = [(law.predict(point) - point[value]) ** 2 for point in points]
    return replace(law, left_out_error=math.sqrt(sum(squares) / len(squares)))


@pytest.mark.parametrize(
    "mistake", [linear_in_the_variables, r_squared_of_one, errors_at_fitted_points]
)
def test_certificate_rejects_other_fits(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_law, "fit_law", mistake)
    assert_rejected("scylla")


def by_accepted_length(points: Any, speeds: Any, law: Any, planned: float) -> Any:
    """The draft model of most accepted drafts, however slow."""
    slow = [{**speed, "tokens_per_second": 1.0 + bool(speed["layers"])} for speed in speeds]
    return recommend(points, slow, law, planned)


def as_measured(points: Any, speeds: Any, law: Any, planned: float) -> Any:
    """Without the accepted length that the law predicts."""
    return recommend(points, speeds, law, max(point["tokens"] for point in points))


@pytest.mark.parametrize("mistake", [by_accepted_length, as_measured])
def test_certificate_rejects_other_recommendations(
    mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "recommend", mistake)
    assert_rejected("scylla")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("scylla:layers=1", "layers"),
        ("scylla:layers=2-1", "layers"),
        ("scylla:layers=1-1-2", "layers"),
        ("scylla:layers=0-1", "layers"),
        ("scylla:tokens=many", "tokens"),
        ("scylla:tokens=", "tokens"),
        ("scylla:tokens=10--20", "tokens"),
        ("scylla:batches=1-2", "batches"),
        ("scylla:batches=1-2-" + "9" * 5000, "batches"),
        ("scylla:size=0", "size"),
        ("scylla:planned=-1", "planned"),
    ],
    ids=lambda value: value[:24],
)
def test_bad_parameters_are_refused(choice: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is ") as error:
        catalogue.build_as(choice, "a study", scaling.ScalingRecipe)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
