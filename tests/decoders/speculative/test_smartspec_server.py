"""SmartSpec for all requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import smartspec
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("smartspec-server")


def test_certificate_rejects_tokens_without_the_acceptance_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smartspec, "expected_tokens", lambda rate, size: 1 + rate * size)
    assert_rejected("smartspec-server")
