"""Dream: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dream")


@pytest.mark.parametrize("parameter", ["steps", "alg", "alg_temperature"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "dream", parameter)
    assert_rejected("dream")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("alg", "confidence"), ("alg", "origin"), ("block", 6), ("steps", 20)],
)
def test_certificate_rejects_another_default(
    parameter: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "dream", **{parameter: value})
    assert_rejected("dream")
