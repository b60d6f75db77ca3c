"""Lookahead decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import lookahead
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("lookahead")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "lookahead", "prompt-lookup")
    assert_rejected("lookahead")


def test_certificate_rejects_columns_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead._Session, "_filler", lambda self, count: [97] * count)
    assert_rejected("lookahead")
