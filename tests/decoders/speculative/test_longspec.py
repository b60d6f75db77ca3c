"""LongSpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative.longspec import WindowDrafter
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("longspec")


@pytest.mark.parametrize(
    "defaults", [{"width": 3}, {"depth": 3}, {"window": 511}, {"sinks": 3}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "longspec", **defaults)
    assert_rejected("longspec")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "longspec", "speculative-sampling")
    assert_rejected("longspec")


def test_certificate_rejects_a_cache_that_is_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowDrafter, "evict", lambda self, kv_cache: None)
    assert_rejected("longspec")
