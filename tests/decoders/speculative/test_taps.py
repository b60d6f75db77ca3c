"""TAPS passes its certificate; wrong compositions do not."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import taps
from anydecode.decoders.speculative.taps import Member
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected

merge_trees = taps.merge_trees


def test_certificate() -> None:
    assert_certified("taps")


def test_trees_merged_one_after_the_other_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turn(trees: list[tuple[str, TokenTree]], size: int) -> TokenTree:
        merged = TokenTree(sources=[])
        assert merged.sources is not None
        for name, tree in trees:
            nodes = {-1: -1}
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                child = merged.child(nodes[parent], token) if parent in nodes else None
                if child is None and parent in nodes and len(merged) < size:
                    child = merged.add(token, nodes[parent])
                    merged.sources.append(name)
                if child is not None:
                    nodes[node] = child
        return merged

    monkeypatch.setattr(taps, "merge_trees", in_turn)
    assert_rejected("taps")


def test_the_first_tree_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "merge_trees", lambda trees, size: merge_trees(trees[:1], size))
    assert_rejected("taps")


def test_a_confidence_from_the_past_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = property(lambda self: self._num_accepted / self._num_drafted)
    monkeypatch.setattr(Member, "confidence", rate)
    assert_rejected("taps")


def test_the_least_confident_first_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = Member.confidence.fget
    monkeypatch.setattr(Member, "confidence", property(lambda self: -confidence(self)))
    assert_rejected("taps")


def test_drafters_without_probabilities_have_the_rate_of_their_first_drafts() -> None:
    member = Member("prompt-lookup", None)
    rates = []
    for accepted in (True, True, False):
        member.tree = TokenTree.chain([5])
        member.update([5 if accepted else 6])
        rates.append(member.confidence)
    assert rates == pytest.approx([1.9 / 2.8, 2.71 / 3.52, 2.439 / 4.168])
    member.tree = TokenTree.chain([5], confidence=0.25)
    assert member.confidence == 0.25
