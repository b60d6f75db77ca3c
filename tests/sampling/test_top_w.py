"""Top-W: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.top_w import top_w_gain
from anydecode.sampling import top_w
from anydecode.sampling.top_w import Geometry
from anydecode.sampling.truncation import TopP
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("top-w")


def test_certificate_rejects_the_most_probable_token_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top_w, "best_set", lambda p, potential, weight: np.array([p.argmax()]))
    assert_rejected("top-w")


def test_certificate_rejects_equal_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Geometry, "cosines", lambda self, tokens: np.ones((len(tokens),) * 2))
    assert_rejected("top-w")


def test_the_nucleus_fails_its_measure() -> None:
    (measure,) = measures_of("top-w")
    assert top_w_gain(20, TopP(0.999)) > measure.margin


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"entropy": 2.0}, {"mass": 2.6}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "top-w", **other)
    assert_rejected("top-w")
