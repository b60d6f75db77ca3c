"""PEARL: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("pearl")


def test_certificate_rejects_parallel_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "pearl", "parallel-draft")
    assert_rejected("pearl")
