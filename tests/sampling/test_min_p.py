"""Min-p sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.min_p import wrong_mass
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.min_p import MinP
from anydecode.sampling.truncation import Epsilon
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("min-p")


def test_certificate_rejects_a_bound_that_does_not_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rule: MinP, candidates: Candidates) -> Candidates:
        return Epsilon(rule.p).apply(candidates)

    monkeypatch.setattr(MinP, "apply", apply)
    assert_rejected("min-p")


def test_top_p_fails_its_measure() -> None:
    (measure,) = measures_of("min-p")
    assert wrong_mass(20, temperature=2.0, top_p=0.9) > measure.margin


@pytest.mark.parametrize("other", [{"p": 0.06}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "min-p", **other)
    assert_rejected("min-p")
