"""Prophet: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("prophet")


@pytest.mark.parametrize("parameter", ["late", "start", "count", "early", "middle"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "prophet", parameter)
    assert_rejected("prophet")
