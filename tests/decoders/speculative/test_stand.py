"""STAND: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.decoders.speculative import stand
from anydecode.decoders.speculative.stand import NgramProbabilities
from anydecode.decoders.speculative.static_trees import TreeShape
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("stand")


@pytest.mark.parametrize(
    "defaults", [{"row_cost": 0.0}, {"row_cost": 0.1}, {"max_ngram": 3}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "stand", **defaults)
    assert_rejected("stand")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "stand", "prompt-lookup")
    assert_rejected("stand")


def test_certificate_rejects_shorter_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stand, "NgramProbabilities", lambda _, **given: NgramProbabilities(3, **given)
    )
    assert_rejected("stand")


def test_certificate_rejects_rows_without_an_average(monkeypatch: pytest.MonkeyPatch) -> None:
    update = NgramProbabilities.update

    def latest(self: NgramProbabilities, key: tuple, tokens: list, probabilities: list) -> None:
        self.rows.pop(key, None)
        update(self, key, tokens, probabilities)

    monkeypatch.setattr(NgramProbabilities, "update", latest)
    assert_rejected("stand")


def test_siblings_that_are_tested_by_another_rule_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = TreeShape.fill

    def independent(self: TreeShape, candidates: Any, size: int, kind: str) -> TokenTree:
        return fill(self, candidates, size, kind="iid")

    monkeypatch.setattr(TreeShape, "fill", independent)
    *_, last = rejection_checks("stand", prompt=REPEATING, samples=20, kind="wor")
    assert not last.passed
