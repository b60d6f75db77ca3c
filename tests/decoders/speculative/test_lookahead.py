"""Lookahead decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative import lookahead
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


def test_certificate() -> None:
    assert_certified("lookahead")


@pytest.mark.parametrize("defaults", [{"window": 6}, {"ngram": 5}, {"max_ngrams": 4}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "lookahead", **defaults)
    assert_rejected("lookahead")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "lookahead", "prompt-lookup")
    assert_rejected("lookahead")


def test_certificate_rejects_columns_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead._Session, "_filler", lambda self, count: [97] * count)
    assert_rejected("lookahead")
