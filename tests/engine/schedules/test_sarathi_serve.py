"""Sarathi-Serve: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anydecode.engine.schedule import ScheduledSpan
from anydecode.engine.schedules import chunked
from anydecode.engine.schedules.sarathi_serve import SarathiServe
from anydecode.scoring.score import ScoreRequest
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("sarathi-serve")


def test_certificate_rejects_one_prompt_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(self: SarathiServe, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes, resumed, fresh = self.split(waiting)
        yield from self.prefill(decodes, [*resumed, *fresh][:1])

    monkeypatch.setattr(SarathiServe, "schedule", schedule)
    assert_rejected("sarathi-serve")


def test_certificate_rejects_chunks_regardless_of_the_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "rows_beside", lambda *given, **how: 512)
    assert_rejected("sarathi-serve")


def test_certificate_rejects_short_prompts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "is_prompt", lambda request: False)
    assert_rejected("sarathi-serve")


def test_certificate_rejects_short_prompts_beyond_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_prompt(self: SarathiServe, request: ScoreRequest) -> bool:
        by_cost = self.budget is None and chunked.is_prompt(request)
        return request.num_rows > self.short or by_cost

    monkeypatch.setattr(SarathiServe, "_is_prompt", is_prompt)
    assert_rejected("sarathi-serve")
