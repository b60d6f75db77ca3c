"""Nexus: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.engine.schedules import nexus
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("nexus")


def test_certificate_rejects_the_smallest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(cost: Any, decodes: int, prompt: int, shares: list[int], **how: Any) -> int:
        return shares[0]

    monkeypatch.setattr(nexus, "chosen_share", smallest)
    assert_rejected("nexus")


def test_certificate_rejects_prompts_that_never_age(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nexus.Nexus.__init__
    monkeypatch.setattr(
        nexus.Nexus, "__init__", lambda self, **given: made(self, **{**given, "ageing": 0.0})
    )
    assert_rejected("nexus")


def test_certificate_rejects_prompts_first_in_a_full_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = nexus.Nexus.__init__
    monkeypatch.setattr(
        nexus.Nexus, "__init__", lambda self, **given: made(self, **{**given, "full": 2.0})
    )
    assert_rejected("nexus")


def test_certificate_rejects_short_prompts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexus, "is_prompt", lambda request: False)
    assert_rejected("nexus")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("row_budget", 511), ("steps", 31), ("alpha", 1.2), ("alpha", 1.35), ("beta", 1.29),
        ("beta", 1.31), ("full", 0.69), ("full", 0.72), ("change", 0.04), ("change", 0.1),
        ("ageing", 15.0), ("ageing", 17.0),
    ],
)  # fmt: skip
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, nexus.Nexus, parameter, value)
    assert_rejected("nexus")
