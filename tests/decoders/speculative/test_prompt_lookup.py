"""Prompt lookup: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative import prompt_lookup
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("prompt-lookup")


@pytest.mark.parametrize(
    "defaults", [{"size": 8}, {"max_ngram": 4}, {"max_ngram": 2}, {"min_ngram": 2}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "prompt-lookup", **defaults)
    assert_rejected("prompt-lookup")


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 5]),  # after 1 2 3
        ({"max_ngram": 2}, [6, 8]),  # after the last 2 3
        ({"max_ngram": 1}, [7, 1]),  # after the last 3
        ({"max_ngram": 4, "min_ngram": 4}, []),
    ],
)
def test_the_longest_suffix_is_found_at_its_last_occurrence(
    options: dict[str, Any], expected: list[int]
) -> None:
    text = [1, 2, 3, 4, 5, 2, 3, 6, 8, 3, 7, 1, 2, 3]
    sequence: Any = SimpleNamespace(prompt=text, tokens=[], prediction=None)
    session = catalogue.build("prompt-lookup", **options).drafter.open(sequence)
    assert session.draft(2).tokens == expected
