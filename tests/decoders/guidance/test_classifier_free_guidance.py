"""Classifier-free guidance: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode.certification.certify import certify_one, claim
from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.guidance.classifier_free_guidance import formula_distance
from anydecode.decoders.guidance.classifier_free_guidance import ClassifierFreeGuidance
from anydecode.sampling.guidance import Guidance
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("classifier-free-guidance")


def test_certificate_rejects_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = Guidance.combine

    def weaker(self: Guidance, *given: Any) -> Any:
        return combine(replace(self, scale=0.9 * self.scale), *given)

    monkeypatch.setattr(Guidance, "combine", weaker)
    assert_rejected("classifier-free-guidance")


@pytest.mark.slow
def test_it_is_certified_by_its_formula_and_is_not_token_exact() -> None:
    card = ClassifierFreeGuidance.card
    assert card.exactness == "lossy" and "by design" in card.summary
    names = [check.name for check in certify_one(card.key).checks]
    assert "distance of a probability from the formula's" in names
    assert not any("equals plain decoding" in name for name in names)
    claimed = replace(card, exactness="token-exact")
    checks = {check.name: check.passed for check in claim(claimed, ClassifierFreeGuidance)}
    assert not checks["equals plain decoding, scripted, T=0.0"]
    assert not checks["equals plain decoding, scripted, T=0.8"]


def test_another_scale_fails_its_measure() -> None:
    (measure,) = measures_of("classifier-free-guidance")
    other = ClassifierFreeGuidance(2.4, list(b"no "))
    assert formula_distance(6, other, scale=2.5) > measure.margin


@pytest.mark.parametrize("other", [{"scale": 1.0}, {"negative": list(b"no ")}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "classifier-free-guidance", **other)
    assert_rejected("classifier-free-guidance")
