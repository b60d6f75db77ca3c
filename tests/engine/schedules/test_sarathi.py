"""SARATHI: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.engine.schedule import DecodesFirst
from anydecode.engine.schedules import chunked
from anydecode.engine.schedules.sarathi import Sarathi
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("sarathi")


def test_certificate_rejects_chunks_of_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sarathi, "schedule", DecodesFirst(100).schedule)
    assert_rejected("sarathi")


def test_certificate_rejects_chunks_regardless_of_the_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "rows_beside", lambda *given, **how: 512)
    assert_rejected("sarathi")
