"""Beam search: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.search.beam import Beam
from certificates import assert_certified, assert_rejected, replace_defaults


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


@pytest.mark.parametrize("other", [{"width": 1}, {"penalty": 0.0}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "beam", **other)
    assert_rejected("beam")


@pytest.mark.parametrize("choose", [max, min])
def test_certificate_rejects_a_bound_from_the_present_length_or_the_worst_beam(
    monkeypatch: pytest.MonkeyPatch, choose: Any
) -> None:
    def is_finished(self: Beam, beams: Any, finished: Any, depth: int, limit: int) -> bool:
        length = depth if choose is max else limit
        bound = choose(self._hypothesis_score(beam.total, max(1, length)) for beam in beams)
        return len(finished) == self.width and bool(bound <= finished[-1].score)

    monkeypatch.setattr(Beam, "_is_finished", is_finished)
    assert_rejected("beam")
