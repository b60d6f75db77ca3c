"""Saguaro: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import saguaro
from anydecode.decoders.speculative.saguaro import fan_out
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("saguaro")


def test_certificate_rejects_an_outcome_without_accepted_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saguaro, "_outcome", lambda result: (0, 0))
    assert_rejected("saguaro")


def test_fan_out_follows_the_acceptance_rate() -> None:
    low, high = fan_out(4, 20, 0.3, 0.5), fan_out(4, 20, 0.95, 0.5)
    assert low[0] > low[3] and high[-1] > high[0] and min(low + high) >= 1
