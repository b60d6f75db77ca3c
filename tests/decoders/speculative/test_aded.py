"""ADED: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.aded import Search
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("aded")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "aded", "prompt-lookup")
    assert_rejected("aded")


def test_certificate_rejects_a_search_without_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Search, "_best", lambda self, node, row: max(row, key=row.__getitem__, default=None)
    )
    assert_rejected("aded")


def test_search_stops_without_successors() -> None:
    assert len(Search(4).run({}, lambda tree, node: {}, 6)) == 0
    assert Search(4).run({3: 1.0}, lambda tree, node: {}, 6).tokens == [3]
