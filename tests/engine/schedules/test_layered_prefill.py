"""Layered prefill: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.engine.schedules import layered_prefill
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("layered-prefill")


def test_certificate_rejects_smaller_groups_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_prefill, "boundaries", lambda layers, groups: [1, layers])
    assert_rejected("layered-prefill")


def test_certificate_rejects_work_regardless_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_prefill, "rows_beside", lambda *given, **how: 512)
    assert_rejected("layered-prefill")


def test_certificate_rejects_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_prefill, "num_groups", lambda rows, unit, max_groups: 1)
    assert_rejected("layered-prefill")


def test_certificate_rejects_short_prompts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_prefill, "is_prompt", lambda request: False)
    assert_rejected("layered-prefill")
