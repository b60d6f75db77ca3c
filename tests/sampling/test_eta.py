"""Eta sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.eta import desmoothing
from anydecode.sampling import eta
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.truncation import Epsilon
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("eta")


def test_certificate_rejects_a_bound_without_the_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eta, "entropy", lambda log_p, p: 0.0)
    assert_rejected("eta")


def test_certificate_rejects_epsilon_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rule: eta.Eta, candidates: Candidates) -> Candidates:
        return Epsilon(rule.epsilon).apply(candidates)

    monkeypatch.setattr(eta.Eta, "apply", apply)
    assert_rejected("eta")


def test_top_p_fails_its_measure() -> None:
    (measure,) = measures_of("eta")
    assert desmoothing(10, top_p=0.9) > measure.margin


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"epsilon": 0.001}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "eta", **other)
    assert_rejected("eta")
