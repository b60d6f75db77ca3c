"""SmartSpec for all requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import smartspec, smartspec_server
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("smartspec-server")


def test_certificate_rejects_tokens_without_the_acceptance_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smartspec, "expected_tokens", lambda rate, size: 1 + rate * size)
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_limit_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        smartspec_server.MinBudget, "size", lambda self, sequence: self.second.size(sequence)
    )
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_limit_by_the_own_draft_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(self: smartspec.RunningSet, sequence: Sequence, size: int) -> float:
        rate = self.running[sequence].rate
        cost = self.costs.cost(sequence, size + 1, [sequence.length], size)
        return smartspec.expected_tokens(rate, size) / cost

    monkeypatch.setattr(smartspec.RunningSet, "goodput", alone)
    assert_rejected("smartspec-server")


def test_certificate_rejects_another_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = smartspec_server.ServerGoodput.__init__
    monkeypatch.setattr(
        smartspec_server.ServerGoodput,
        "__init__",
        lambda self, **given: made(self, **{**given, "max_drafts": 7}),
    )
    assert_rejected("smartspec-server")


def test_costs_that_are_no_costs_are_refused() -> None:
    for given in ({"fixed": -1.0}, {"fixed": 0.0, "per_row": 0.0}):
        with pytest.raises(InvalidRequestError, match="must not be negative"):
            smartspec_server.ServerGoodput(**given)
    with pytest.raises(InvalidRequestError, match="max_drafts is 0"):
        smartspec_server.ServerGoodput(0)
