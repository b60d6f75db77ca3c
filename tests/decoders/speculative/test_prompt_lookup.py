"""Prompt lookup: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.prompt_lookup import NgramIndex
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("prompt-lookup")


def test_certificate_rejects_long_suffixes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    continuation = NgramIndex.continuation
    monkeypatch.setattr(
        NgramIndex, "continuation", lambda self, count, shortest: continuation(self, count, 3)
    )
    assert_rejected("prompt-lookup")


def test_certificate_rejects_the_tokens_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    continuation = NgramIndex.continuation
    monkeypatch.setattr(
        NgramIndex,
        "continuation",
        lambda self, count, shortest: continuation(self, count + 1, shortest)[1:],
    )
    assert_rejected("prompt-lookup")
