"""distserve: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from anydecode.cluster.control.distserve import (
    Found,
    Latency,
    Limits,
    Placement,
    PlacementSearch,
)
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("distserve")


def test_limits_that_are_compared_separately_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def separate(self: Limits, latencies: Sequence[Latency]) -> float:
        first = sum(one <= self.ttft for one, _ in latencies)
        return min(first, sum(one <= self.tpot for _, one in latencies)) / len(latencies)

    monkeypatch.setattr(Limits, "share", separate)
    assert_rejected("distserve")


def test_the_rate_that_fails_first_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    goodput = PlacementSearch.goodput

    def above(self: PlacementSearch, *given: object) -> object:
        found = goodput(self, *given)  # type: ignore[arg-type]
        failing = [rate for rate, share in found.probes if share < self.attainment]
        return type(found)(found.placement, min(failing, default=found.goodput), found.probes)

    monkeypatch.setattr(PlacementSearch, "goodput", above)
    assert_rejected("distserve")


def test_a_unit_with_the_highest_goodput_of_all_its_workers_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Found, "goodput_per_worker", property(lambda self: self.goodput))
    assert_rejected("distserve")


def test_a_replica_too_few_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Found, "replicas", lambda self, rate: max(1, int(rate / self.goodput)))
    assert_rejected("distserve")


def test_a_search_from_the_goodput_of_the_placement_before_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goodput, rates = PlacementSearch.goodput, [1.0]

    def near(self: PlacementSearch, placement: Placement, limits: Limits, *given: Any) -> Found:
        found = goodput(self, placement, limits, given[0], rates[-1])
        rates.append(found.goodput or rates[-1])
        return found

    monkeypatch.setattr(PlacementSearch, "goodput", near)
    assert_rejected("distserve")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("attainment", 0.85), ("attainment", 0.95), ("precision", 0.2), ("max_probes", 20)],
)
def test_another_default_is_rejected(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, PlacementSearch, parameter, value)
    assert_rejected("distserve")


@pytest.mark.parametrize(
    "options",
    [{"attainment": 0}, {"attainment": 1.1}, {"precision": 0}, {"max_probes": 0}],
    ids=str,
)
def test_parameters_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match="distserve has"):
        PlacementSearch(**options)  # type: ignore[arg-type]


def test_a_placement_in_words() -> None:
    assert str(Placement(mixed=2)) == "2 mixed"
    assert str(Placement(prefill=1, decode=3)) == "1 prefill, 3 decode"


def test_the_limit_that_is_missed_is_known() -> None:
    """Above 8 requests per second, a quarter of the requests have late tokens, one in ten begins
    late, and both are counted at the lowest rate that is too high."""

    def serve(placement: Placement, rate: float) -> list[tuple[float, float]]:
        late, slow = (4, 10) if rate > 8 else (0, 0)
        if rate > 12:
            late, slow = 40, 40
        return [(2.0 if n < late else 0.1, 2.0 if n >= 40 - slow else 0.1) for n in range(40)]

    found = PlacementSearch().goodput(Placement(mixed=1), Limits(1.0, 1.0), serve, 1.0)
    assert found.missed == (0.1, 0.25)
    assert 7.5 <= found.goodput <= 8
    unbounded = PlacementSearch(max_probes=2).goodput(
        Placement(mixed=1), Limits(1.0, 1.0), serve, 1.0
    )
    assert unbounded.missed is None
