"""Saguaro: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.oracles.speculative import saguaro as saguaro_oracle
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


def test_certificate_rejects_a_fan_out_that_exceeds_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded(size: int, budget: int, acceptance: float, exponent: float) -> list[int]:
        shares = [acceptance ** (k / (1 + exponent)) for k in range(size + 1)]
        shares[-1] *= (1 - acceptance) ** (-1 / (1 + exponent))
        return [max(1, round(budget * share / sum(shares))) for share in shares]

    assert sum(rounded(3, 16, 0.3, 0.5)) != 16 or sum(rounded(3, 5, 0.95, 0.5)) != 5
    monkeypatch.setattr(saguaro_oracle, "fan_out", rounded)
    assert_rejected("saguaro")


def test_fan_out_follows_the_acceptance_rate() -> None:
    low, high = fan_out(4, 20, 0.3, 0.5), fan_out(4, 20, 0.95, 0.5)
    assert low[0] > low[3] and high[-1] > high[0] and min(low + high) >= 1
    assert sum(low) == sum(high) == 20 and fan_out(4, 5, 0.3, 0.5) == [1] * 5
