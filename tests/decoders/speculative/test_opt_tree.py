"""OPT-Tree: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.framework.draft_candidates import DraftCandidates
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("opt-tree")


@pytest.mark.parametrize("defaults", [{"size": 15}, {"delta": 0.4}, {"depth": 9}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "opt-tree", **defaults)
    assert_rejected("opt-tree")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "opt-tree", "speculative-sampling")
    assert_rejected("opt-tree")


def test_certificate_rejects_draft_probabilities_without_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        DraftCandidates, "acceptance_probabilities", property(lambda self: self.probabilities)
    )
    assert_rejected("opt-tree")
