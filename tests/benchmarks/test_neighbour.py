"""The times between a client's tokens, alone and beside attacks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx")

from anydecode.benchmarks.serving.neighbour import Neighbour, bench_neighbour, measure
from anydecode.errors import InvalidRequestError


@pytest.mark.slow
@pytest.mark.model
def test_a_client_is_measured_alone_and_beside_an_attack(default_model_path: Path) -> None:
    alone, beside = measure(str(default_model_path), 12, 2, ["wrong decoders"], threads=1)
    assert (alone.attack, beside.attack) == ("", "wrong decoders")
    assert min(alone.gaps, beside.gaps) > 0 and not alone.statuses
    assert 0 < beside.p50 <= beside.p99 <= beside.longest
    assert set(beside.statuses) <= {"400"}


def test_an_unknown_attack_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--attack is 'x'; allowed are nested"):
        bench_neighbour(attack=["x"])


@pytest.mark.parametrize("p99, code", [(0.03, 0), (0.04, 1)])
def test_more_than_three_times_the_quiet_p99_fails(
    p99: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Neighbour("", 9, 0.01, 0.01, 0.02, {})
    results = [alone, Neighbour("half a body", 9, 0.01, p99, 0.1, {"0": 2})]
    monkeypatch.setattr("anydecode.benchmarks.serving.neighbour.measure", lambda *rest: results)
    assert bench_neighbour("x", 2, 1, None, None, None) == code
