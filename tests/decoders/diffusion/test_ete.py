"""Explore-then-exploit (ete): its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("ete")


@pytest.mark.parametrize("parameter", ["candidates", "block", "reward", "cache"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "ete", parameter)
    assert_rejected("ete")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("candidates", 2), ("candidates", 4), ("reward", 0.5), ("reward", 2.0), ("ahead", 2)],
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "ete", **{parameter: value})
    assert_rejected("ete")
