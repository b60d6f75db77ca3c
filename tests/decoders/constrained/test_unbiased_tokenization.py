"""Decoding without tokenization bias: its certificate, and a mistake that it rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.constrained import unbiased_tokenization
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("unbiased-tokenization")


def test_certificate_rejects_covers_that_the_tokenizer_cannot_produce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unbiased_tokenization, "is_written", lambda *_: True)
    assert_rejected("unbiased-tokenization")
