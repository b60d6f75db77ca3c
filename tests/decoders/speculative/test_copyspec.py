"""CopySpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.rounds import rounds, scripted, wordy
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative import copyspec
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("copyspec")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "copyspec", "prompt-lookup")
    assert_rejected("copyspec")


def test_certificate_rejects_the_latest_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copyspec, "NgramIndex", lambda sizes, keep_first: NgramIndex(sizes))
    assert_rejected("copyspec")


def test_bonus_token_follows_the_accepted_tokens() -> None:
    """When the last copied token is wrong, the bonus token must follow the accepted ones."""
    options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    with scripted(wordy()) as llm:
        found = rounds(llm, "copyspec:size=2,ngram=1", "the cab had a bad cab", 40, **options)
        plain = llm.generate("the cab had a bad cab", max_tokens=40, **options).tokens
    assert any(len(one.tokens) == 2 and len(one.accepted) == 1 for one in found)
    assert [token for one in found for token in one.generated][:40] == plain
