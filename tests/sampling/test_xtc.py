"""Exclude top choices: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.samplers import softmax
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.xtc import ExcludeTopChoices
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("xtc")


def test_certificate_rejects_half_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ExcludeTopChoices.apply

    def halved(rule: ExcludeTopChoices, candidates: Candidates) -> Candidates:
        return apply(replace(rule, probability=rule.probability / 2), candidates)

    monkeypatch.setattr(ExcludeTopChoices, "apply", halved)
    assert_rejected("xtc")


def test_certificate_rejects_a_rule_that_keeps_no_top_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply(rule: ExcludeTopChoices, candidates: Candidates) -> Candidates:
        left = np.flatnonzero(softmax(candidates.scores) < rule.threshold)
        return candidates.keep(left) if len(left) else candidates

    monkeypatch.setattr(ExcludeTopChoices, "apply", apply)
    (measure,) = measures_of("xtc")
    assert measure.run(50) > measure.margin
    assert_rejected("xtc")


@pytest.mark.parametrize(
    ("probabilities", "kept"),
    [
        ([0.2, 0.2, 0.6], [1]),  # of equal probabilities the highest id
        ([0.2, 0.6, 0.2], [2]),
        ([0.25, 0.2, 0.5, 0.05], [1, 3]),  # the least likely above the threshold, and those below
    ],
)
def test_the_least_likely_top_choice_is_kept(probabilities: list[float], kept: list[int]) -> None:
    candidates = Candidates(None, np.log(np.array(probabilities, np.float32)))
    assert ExcludeTopChoices(1.0, 0.15).apply(candidates).tokens.tolist() == kept


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"threshold": 0.12}, {"probability": 0.4}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "xtc", **other)
    assert_rejected("xtc")
