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


def test_a_confidence_of_the_whole_past_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Member, tokens: list[int]) -> None:
        if len(self.tree):
            self._num_accepted += self.tree.child(-1, tokens[0]) is not None
            self._num_drafted += 1
            self.tree = TokenTree()

    monkeypatch.setattr(Member, "update", update)
    assert_rejected("taps")
