"""Beam search: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.search.beam import Beam
from anydecode.decoders.search.beam_group import BeamGroup, LengthRule
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("beam")


def test_certificate_rejects_a_score_without_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthRule, "score", lambda self, total, length: total)
    assert_rejected("beam")


def test_certificate_rejects_a_search_that_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Beam.__init__
    monkeypatch.setattr(
        Beam, "__init__", lambda self, *given, **more: made(self, *given, **{**more, "early": True})
    )
    assert_rejected("beam")


def test_certificate_rejects_a_greedy_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = BeamGroup._expand

    def greedy(self: BeamGroup, rows: Any, costs: Any) -> Any:
        return [one for one in expand(self, rows, costs) if one.number == 0]

    monkeypatch.setattr(BeamGroup, "_expand", greedy)
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
    def is_finished(self: LengthRule, totals: Any, finished: Any, depth: int, limit: int) -> bool:
        length = depth if choose is max else limit
        bound = choose(self.score(total, max(1, length)) for total in totals)
        return len(finished) == self.width and bool(bound <= finished[-1].score)

    monkeypatch.setattr(LengthRule, "is_finished", is_finished)
    assert_rejected("beam")
