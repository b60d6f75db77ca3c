"""Bounded adaptive thresholds (bacd-tccf): its certificate, and mistakes that it rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, ignore_parameter


def test_certificate() -> None:
    assert_certified("bacd-tccf")


@pytest.mark.parametrize("parameter", ["high", "coarse", "fine", "marker", "low"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "bacd-tccf", parameter)
    assert_rejected("bacd-tccf")
