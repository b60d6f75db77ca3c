"""Prompt lookup: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative import prompt_lookup
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("prompt-lookup")


def test_certificate_rejects_long_suffixes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "NgramIndex", lambda sizes: NgramIndex([max(sizes)]))
    assert_rejected("prompt-lookup")


def test_certificate_rejects_the_tokens_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    find = NgramIndex.find

    def late(self: NgramIndex, text: list[int]) -> tuple[int, int]:
        end, length = find(self, text)
        return end + 1, length

    monkeypatch.setattr(NgramIndex, "find", late)
    assert_rejected("prompt-lookup")
