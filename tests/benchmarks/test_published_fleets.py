"""Published settings of fleets: the durations of passes, and the systems that are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.benchmarks.published_fleets import (
    FittedSeconds,
    RooflineSeconds,
    distserve,
    mooncake,
    poisson,
    xllm,
)
from anydecode.cluster.simulator.trace_files import TracedRequest


class FewRows:
    """The positions that the rows of a pass attend to."""

    def __init__(self, prefix: list[int]) -> None:
        self.prefix = np.array(prefix, np.int32)

    def __len__(self) -> int:
        return len(self.prefix)


def a_pass(*spans: tuple[int, int]) -> Any:
    """A pass over spans: the number of rows, and of the positions to which the last one attends."""
    prefix = [stop - count + 1 + row for count, stop in spans for row in range(count)]
    scheduled = [(None, None, count) for count, _ in spans]
    return SimpleNamespace(rows=FewRows(prefix), scheduled=scheduled)


def test_durations_of_distserve_are_those_of_its_table() -> None:
    """A prompt of 512 tokens, 32 answers of 513 positions each, 100 of them, and a prompt beside
    an answer: of the constants, that of prompts alone."""
    seconds = FittedSeconds()
    prompt = 18.10 + 0.1019 * 512 + 7.12e-6 * 512**2
    assert seconds(a_pass((512, 512))) == pytest.approx(prompt / 1000)
    few = 19.93 + 6.27e-4 * 32 * 513 + 0.0385 * 32
    assert seconds(a_pass(*[(1, 513)] * 32)) == pytest.approx(few / 1000)
    many = 7.17 + 5.80e-4 * 100 * 513 + 0.158 * 100
    assert seconds(a_pass(*[(1, 513)] * 100)) == pytest.approx(many / 1000)
    both = prompt + 6.27e-4 * 513 + 0.0385
    assert seconds(a_pass((1, 513), (512, 512))) == pytest.approx(both / 1000)
    rest = 18.10 + 0.1019 * 12 + 7.12e-6 * (512**2 - 500**2)
    assert seconds(a_pass((12, 512))) == pytest.approx(rest / 1000)


def test_the_slower_of_operations_and_bytes_is_the_duration() -> None:
    of_bytes = RooflineSeconds(1e9, 1, 1, 1000, flops=1e18, bandwidth=1e9, constant=0.5)
    assert of_bytes(a_pass((1, 100), (1, 300))) == pytest.approx(0.5 + (2e9 + 4e5) / 1e9)
    of_rows = RooflineSeconds(1e9, 2, 10, 0, flops=1e9, bandwidth=1e18, constant=0.0)
    assert of_rows(a_pass((3, 3))) == pytest.approx((2e9 * 3 + 4 * 2 * 10 * 6) / 1e9)


def test_all_systems_of_a_setting_have_as_many_workers() -> None:
    for setting in (distserve(), mooncake(), xllm()):
        systems = (*setting.better, *setting.worse, *setting.others)
        assert len({one.placement.workers for one in systems}) == 1
        assert len({one.name for one in systems}) == len(systems)


def test_requests_at_random_times_are_those_that_are_short_enough() -> None:
    trace = [TracedRequest(0.0, 10 * number, 5) for number in range(1, 201)]
    found = poisson(trace, 1005)
    assert [one.num_prompt for one in found] == list(range(10, 1001, 10))
    gaps = np.diff([one.time for one in found])
    assert gaps.min() > 0 and 0.7 < gaps.mean() < 1.3
