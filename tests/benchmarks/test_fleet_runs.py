"""Fleets of this machine for benchmarks."""

from __future__ import annotations

import pytest

from anydecode.benchmarks.fleet_runs import local_fleet
from anydecode.cluster.launcher import Place
from anydecode.errors import FleetError


def test_a_worker_that_cannot_join_is_an_error() -> None:
    wanted = [Place("a name that is none", "mixed")]
    options = {"threads": 1, "cache_positions": 4096}
    with pytest.raises(FleetError, match="a worker of the fleet has ended"):
        with local_fleet("tiny-autoregressive", wanted, **options):
            pass
