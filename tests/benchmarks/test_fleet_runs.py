"""Fleets of this machine for benchmarks."""

from __future__ import annotations

import pytest

from anydecode.benchmarks.fleet_runs import local_fleet, served_by
from anydecode.certification.checks import scripted_llm
from anydecode.cluster.launcher import Place
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals
from anydecode.errors import FleetError


def test_a_worker_that_cannot_join_is_an_error() -> None:
    wanted = [Place("a name that is none", "mixed")]
    options = {"threads": 1, "cache_positions": 4096}
    with pytest.raises(FleetError, match="a worker of the fleet has ended"):
        with local_fleet("tiny-autoregressive", wanted, **options):
            pass


def test_each_request_is_served_to_its_last_token() -> None:
    arriving = arrivals([TracedRequest(0.0, 20, 3), TracedRequest(0.01, 30, 5)], 1.0)
    with scripted_llm() as llm:
        served = served_by(llm, arriving)
    assert [len(one.token_times) for one in served] == [3, 5]
