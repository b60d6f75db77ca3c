"""SuffixDecoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.decoders.speculative import suffix
from anydecode.decoders.speculative.suffix import SuffixAutomaton, SuffixDrafter, likely_tree
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("suffix")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "suffix", "prompt-lookup")
    assert_rejected("suffix")


def test_certificate_rejects_improbable_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(automaton: Any, state: int, size: int, depth: int, bound: float) -> Any:
        return likely_tree(automaton, state, size, depth, 1e-9)

    monkeypatch.setattr(suffix, "likely_tree", every)
    assert_rejected("suffix")


def test_certificate_rejects_answers_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuffixDrafter, "learn", lambda self, answer: None)
    assert_rejected("suffix")


def test_automaton_drafts_by_frequency() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 4, 1]:
        automaton.extend(token)
    state = automaton.next[automaton.next[0][1]][2]
    assert automaton.counts[state] == 3
    tree, total = likely_tree(automaton, state, 2, 3, 0.1)
    assert tree.tokens == [4, 1] and total == pytest.approx(2 / 3 + 2 / 3)


def test_memory_is_bounded() -> None:
    drafter = SuffixDrafter(memory=10)
    for _ in range(5):
        drafter.learn([1, 2, 3, 4])
        assert drafter.past_tokens <= 10
    drafter.clear()
    assert drafter.past_tokens == 0 and len(drafter.past.next) == 1


def test_a_match_follows_answers_that_are_added_later() -> None:
    """At first 2 occurs after 1 alone, so both have one state; the second answer divides it."""
    drafter = SuffixDrafter()
    drafter.learn([1, 2, 3])
    sequence: Any = SimpleNamespace(prompt=[2], tokens=[], prediction=None)
    session = drafter.open(sequence)
    assert session.draft(8).tokens == [3]
    drafter.learn([5, 2, 6])
    assert sorted(session.draft(8).tokens) == [3, 6]
