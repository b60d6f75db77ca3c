"""Dimple: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dimple")


@pytest.mark.parametrize("parameter", ["threshold", "priors", "steps", "prefill", "cache"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "dimple", parameter)
    assert_rejected("dimple")
