"""SuffixDecoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.decoders.framework import text_parts
from anydecode.decoders.speculative import suffix
from anydecode.decoders.speculative.suffix import (
    Match,
    SuffixAutomaton,
    SuffixDrafter,
    best_tree,
    likely_tree,
    shortening,
)
from anydecode.scoring.tree import ROOT, TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


def test_certificate() -> None:
    assert_certified("suffix")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "suffix", "prompt-lookup")
    assert_rejected("suffix")


@pytest.mark.parametrize("defaults", [{"factor": 1.0}, {"min_probability": 0.2}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "suffix", **defaults)
    assert_rejected("suffix")


def test_certificate_rejects_improbable_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(states: Any, size: int, bound: float, total: float) -> Any:
        return likely_tree(states, size, 1e-9, total)

    monkeypatch.setattr(suffix, "likely_tree", every)
    assert_rejected("suffix")


def test_certificate_rejects_the_longest_match_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(matches: Any) -> Any:
        return islice(shortening(matches), 1)

    monkeypatch.setattr(suffix, "shortening", longest)
    assert_rejected("suffix")


def test_certificate_rejects_the_first_match_with_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter match may be more certain."""

    def first(sources: Any, size: int, factor: float, bound: float) -> Any:
        trees = (best_tree([source], size, factor, bound) for source in sources)
        return next((tree for tree in trees if len(tree)), TokenTree())

    monkeypatch.setattr(suffix, "best_tree", first)
    assert_rejected("suffix")


def test_certificate_rejects_memory_that_is_dropped_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_parts, "NUM_PARTS", 1)
    assert_rejected("suffix")


def test_certificate_rejects_answers_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuffixDrafter, "learn", lambda self, answer: None)
    assert_rejected("suffix")


def test_automaton_drafts_by_frequency() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 4, 1]:
        automaton.append(token)
    state = automaton.next[automaton.next[0][1]][2]
    assert automaton.counts[state] == 3
    nodes, total = likely_tree([(automaton, state)], 2, 0.1)
    assert [node[:2] for node in nodes] == [(4, ROOT), (1, 0)]
    assert [node[2] for node in nodes] == pytest.approx([2 / 3, 2 / 3])
    assert total == pytest.approx(2 / 3 + 2 / 3)


def test_counts_of_several_parts_are_added() -> None:
    states = []
    for text in ([1, 2, 3], [1, 2, 4, 1, 2, 4]):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        states.append((automaton, automaton.next[automaton.next[0][1]][2]))
    nodes, total = likely_tree(states, 2, 0.1)
    assert [node[:2] for node in nodes] == [(4, ROOT), (3, ROOT)] and total == pytest.approx(1.0)


def test_the_confidence_is_the_mean_share_of_the_most_frequent_child() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 4, 1]:
        automaton.append(token)
    match = Match(automaton, automaton.next[automaton.next[0][1]][2], 2)
    tree = best_tree([[match]], 3, 2.0, 0.1)  # 4 two times of three, always with 1 after it
    assert sorted(zip(tree.tokens, tree.parents, strict=True)) == [(1, 0), (3, ROOT), (4, ROOT)]
    assert tree.confidence == pytest.approx((2 / 3 + 1) / 2)


def test_no_memory_keeps_nothing() -> None:
    drafter = SuffixDrafter(memory=0)
    drafter.learn([1, 2, 3, 4])
    assert drafter.num_bytes == 0 and not drafter.parts


def test_a_match_follows_answers_that_are_added_later() -> None:
    """At first 2 occurs after 1 alone, so both have one state; the second answer divides it."""
    drafter = SuffixDrafter()
    drafter.learn([1, 2, 3])
    sequence: Any = SimpleNamespace(prompt=[2], tokens=[], prediction=None)
    session = drafter.open(sequence)
    assert session.draft(8).tokens == [3]
    drafter.learn([5, 2, 6])
    assert sorted(session.draft(8).tokens) == [3, 6]
