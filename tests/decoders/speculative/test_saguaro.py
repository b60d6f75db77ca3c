"""Saguaro: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.oracles.speculative import saguaro as saguaro_oracle
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.decoders.framework import draft_time
from anydecode.decoders.framework.draft_candidates import DraftCandidates
from anydecode.decoders.speculative import saguaro
from anydecode.decoders.speculative.saguaro import fan_out
from anydecode.errors import InvalidRequestError
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


@pytest.mark.slow
def test_reshaped_drafts_that_are_compared_with_the_plain_distribution_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mislabelled(candidates: DraftCandidates, count: int, factor: float) -> DraftCandidates:
        found = own(candidates, count, factor)
        plain = dict(zip(candidates.tokens.tolist(), candidates.probabilities, strict=True))
        probabilities = np.array([plain[token] for token in found.tokens.tolist()])
        return DraftCandidates(found.tokens, probabilities, found.keys)

    own = saguaro.reshaped
    monkeypatch.setattr(saguaro, "reshaped", mislabelled)
    assert not next(rejection_checks("saguaro", fan=1, discount=0.2)).passed


def test_the_reshaped_distribution_has_less_of_the_most_probable_tokens() -> None:
    candidates = DraftCandidates(
        np.array([7, 3, 5]), np.array([0.3, 0.5, 0.2]), np.array([0.4, -0.1, -2.0])
    )
    found = saguaro.reshaped(candidates, 1, 0.2)
    assert found.tokens.tolist() == [7, 3, 5]
    assert found.probabilities == pytest.approx(np.array([0.5, 1 / 6, 1 / 3]))
    assert saguaro.reshaped(candidates, 2, 0.01).tokens.tolist() == [5, 7, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 0.5}, "with acceptance='rejection' alone"),
        ({"discount": 0.0, "acceptance": "rejection"}, "0 < discount <= 1"),
    ],
)
def test_discounts_are_refused_where_they_do_nothing(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("saguaro", **options)


def test_fan_out_follows_the_acceptance_rate() -> None:
    low, high = fan_out(4, 20, 0.3, 0.5), fan_out(4, 20, 0.95, 0.5)
    assert low[0] > low[3] and high[-1] > high[0] and min(low + high) >= 1
    assert sum(low) == sum(high) == 20 and fan_out(4, 5, 0.3, 0.5) == [1] * 5


def test_certificate_rejects_free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_time, "shares_device", lambda sequence: False)
    assert_rejected("saguaro")


def test_certificate_rejects_drafts_beyond_the_shared_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = saguaro.Saguaro._prepare
    monkeypatch.setattr(
        saguaro.Saguaro,
        "_prepare",
        lambda self, growing, tree, size, ticket: prepare(self, growing, tree, self.size, ticket),
    )
    assert_rejected("saguaro")
