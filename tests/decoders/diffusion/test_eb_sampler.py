"""Entropy-bounded unmasking: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.decoders.diffusion.eb_sampler import EntropyBoundedUnmasking
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("eb-sampler")


@pytest.mark.parametrize("parameter", ["gamma", "remasking", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "eb-sampler", parameter)
    assert_rejected("eb-sampler")


@pytest.mark.parametrize(
    ("entropies", "count"),
    [
        ([2.0, 0.1, 0.1, 0.1], 2),  # 2.0 is the largest; 0.1 fits, 0.2 does not
        ([0.1, 2.0, 0.1, 0.1], 2),
        ([0.05, 0.1, 0.1, 2.0], 3),
        ([0.2, 0.3, 0.1, 0.1], 1),
    ],
)
def test_the_largest_entropy_is_left_out_wherever_it_is(entropies: list[float], count: int) -> None:
    """The masks are ranked from the left."""
    found: Any = SimpleNamespace(entropies=lambda positions: np.array(entropies)[positions])
    canvas: Any = None
    positions, ranks = np.arange(4), -np.arange(4.0)
    chosen = EntropyBoundedUnmasking(0.15).select(canvas, found, positions, ranks)
    assert np.flatnonzero(chosen).tolist() == list(range(count))
