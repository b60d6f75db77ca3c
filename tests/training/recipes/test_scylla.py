"""Laws of draft models: their certificate, and mistakes that it rejects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import catalogue
from anydecode.errors import InvalidRequestError
from anydecode.training import draft_model, scaling, scaling_law
from certificates import assert_certified, assert_rejected, replace_defaults

fit_law, recommend = scaling_law.fit_law, scaling.recommend


@pytest.mark.slow
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


def by_accepted_length(points: Any, speeds: Any, law: Any, planned: float, size: int) -> Any:
    """The draft model of most accepted drafts, however slow."""
    slow = [{**speed, "tokens_per_second": 1.0 + bool(speed["layers"])} for speed in speeds]
    return recommend(points, slow, law, planned, size)


def as_measured(points: Any, speeds: Any, law: Any, planned: float, size: int) -> Any:
    """Without the accepted length that the law predicts."""
    return recommend(points, speeds, law, max(point["tokens"] for point in points), size)


def without_a_limit(points: Any, speeds: Any, law: Any, planned: float, size: int) -> Any:
    """With more tokens per pass than a round can have."""
    return recommend(points, speeds, law, planned, 1000)


@pytest.mark.parametrize("mistake", [by_accepted_length, as_measured, without_a_limit])
def test_certificate_rejects_other_recommendations(
    mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "recommend", mistake)
    assert_rejected("scylla")


@pytest.mark.parametrize(
    "defaults", [{"batches": "2-4-8"}, {"size": 7}, {"planned": 8000}], ids=str
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "scylla", **defaults)
    assert_rejected("scylla")


def of_layers(points: Any, value: str, variables: Any) -> Any:
    """With the number of layers for that of the parameters."""
    names = ["layers" if name == "parameters" else name for name in variables]
    return fit_law(points, value, names)


def linear_in_the_batch(points: Any, value: str, variables: Any) -> Any:
    if variables == ["batch"]:
        points = [{**point, "batch": math.exp(point["batch"])} for point in points]
    return fit_law(points, value, variables)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [of_layers, linear_in_the_batch])
def test_certificate_rejects_other_laws_of_a_study(
    mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "fit_law", mistake)
    assert_rejected("scylla")


@pytest.mark.slow
def test_certificate_rejects_lengths_at_another_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = draft_model.DraftModelRun.measure

    def measure(self: draft_model.DraftModelRun) -> dict[str, Any]:
        return {"temperature 0.0": own(self)["temperature 0.8"]}

    monkeypatch.setattr(draft_model.DraftModelRun, "measure", measure)
    assert_rejected("scylla")


@pytest.mark.slow
def test_certificate_rejects_fewer_learned_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    own = scaling.DraftModelRun

    def halved(checkpoint: Any, folder: Any, settings: Any, **given: Any) -> Any:
        return own(checkpoint, folder, replace(settings, steps=settings.steps // 2), **given)

    monkeypatch.setattr(scaling, "DraftModelRun", halved)
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
