"""Top-n-sigma sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.top_n_sigma import changed_sets
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.top_n_sigma import TopNSigma
from anydecode.sampling.truncation import TopK
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("top-n-sigma")


def test_certificate_rejects_a_fixed_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopNSigma, "apply", lambda rule, candidates: TopK(2).apply(candidates))
    assert_rejected("top-n-sigma")


def test_certificate_rejects_a_bound_below_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rule: TopNSigma, candidates: Candidates) -> Candidates:
        scores = candidates.scores
        bound = float(scores.mean()) - rule.n * float(scores.std())
        return candidates.keep(np.flatnonzero(scores >= bound))

    monkeypatch.setattr(TopNSigma, "apply", apply)
    assert_rejected("top-n-sigma")


def test_min_p_fails_its_measure() -> None:
    (measure,) = measures_of("top-n-sigma")
    assert changed_sets(20, min_p=0.05) > measure.margin


@pytest.mark.parametrize("other", [{"n": 1.1}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "top-n-sigma", **other)
    assert_rejected("top-n-sigma")
