"""PEARL: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import (
    assert_certified,
    assert_rejected,
    ignore_parameter,
    replace_defaults,
    replace_method,
)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("pearl")


def test_certificate_rejects_post_verify_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "pearl", pre_verify=False)
    assert_rejected("pearl")


def test_certificate_rejects_drafts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "pearl", "speculative-sampling")
    assert_rejected("pearl")


def test_certificate_rejects_pre_verification_in_every_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignore_parameter(monkeypatch, "pearl", "pre_verify")
    assert_rejected("pearl")
