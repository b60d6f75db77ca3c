"""Token healing: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.constrained import token_healing
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("token-healing")


def test_certificate_rejects_the_same_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        token_healing, "healing_tokens", lambda vocab, tail: set(vocab.tokens_equal_to(tail))
    )
    assert_rejected("token-healing")


def test_certificate_rejects_a_prompt_that_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        token_healing.TokenHealing, "cut", lambda self, tokenizer, prompt: len(prompt)
    )
    assert_rejected("token-healing")
