"""Beam search: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.search.beam import Beam
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("beam")


def test_certificate_rejects_a_score_without_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beam, "_hypothesis_score", lambda self, total, length: total)
    assert_rejected("beam")


def test_certificate_rejects_a_search_that_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Beam.__init__
    monkeypatch.setattr(
        Beam, "__init__", lambda self, *given, **more: made(self, *given, **{**more, "early": True})
    )
    assert_rejected("beam")


def test_certificate_rejects_a_greedy_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = Beam._expand
    monkeypatch.setattr(
        Beam, "_expand", lambda self, beams, rows: expand(self, beams[:1], rows[:1])
    )
    assert_rejected("beam")
