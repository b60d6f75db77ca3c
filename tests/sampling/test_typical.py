"""Locally typical sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.typical import typicality
from anydecode.sampling import typical
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.truncation import TopP
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("typical")


def test_certificate_rejects_the_most_probable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rule: typical.Typical, candidates: Candidates) -> Candidates:
        return TopP(rule.p).apply(candidates)

    monkeypatch.setattr(typical.Typical, "apply", apply)
    assert_rejected("typical")


def test_certificate_rejects_an_entropy_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    nats = typical.entropy
    monkeypatch.setattr(typical, "entropy", lambda log_p, p: nats(log_p, p) / 0.6931)
    assert_rejected("typical")


def test_top_p_fails_its_measure() -> None:
    (measure,) = measures_of("typical")
    assert typicality(40, top_p=0.9) > measure.margin


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"p": 0.9}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "typical", **other)
    assert_rejected("typical")
