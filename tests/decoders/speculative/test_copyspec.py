"""CopySpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.rounds import rounds, scripted, wordy
from anydecode.decoders.speculative.copyspec import RollingIndex
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("copyspec")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "copyspec", "prompt-lookup")
    assert_rejected("copyspec")


def test_certificate_rejects_the_latest_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: RollingIndex, key: int, start: int) -> None:
        self._starts[key] = start

    monkeypatch.setattr(RollingIndex, "_add_run", overwrite)
    assert_rejected("copyspec")


def test_index_finds_the_first_occurrence_of_its_gram() -> None:
    index = RollingIndex(3)
    index.extend([1, 2, 3, 9, 1, 2, 3, 8, 1, 2])
    assert index.match() is None
    index.extend([3])
    assert index.match() == 0


def test_bonus_token_follows_the_accepted_tokens() -> None:
    """When the last copied token is wrong, the bonus token must follow the accepted ones."""
    options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    with scripted(wordy()) as llm:
        found = rounds(llm, "copyspec:size=2,ngram=1", "the cab had a bad cab", 40, **options)
        plain = llm.generate("the cab had a bad cab", max_tokens=40, **options).tokens
    assert any(len(one.tokens) == 2 and len(one.accepted) == 1 for one in found)
    assert [token for one in found for token in one.generated][:40] == plain
