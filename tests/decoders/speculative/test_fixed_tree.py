"""Trees of a fixed shape: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.decoders.speculative.static_trees import TreeShape
from certificates import assert_certified, assert_rejected, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("fixed-tree")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "fixed-tree", "speculative-sampling")
    assert_rejected("fixed-tree")


def test_certificate_rejects_another_default_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TreeShape.of([(0,), (1,), (0, 0)])
    monkeypatch.setattr(TreeShape, "of", lambda paths: shape)
    assert_rejected("fixed-tree")


@pytest.mark.slow
def test_certificate_rejects_siblings_that_are_drawn_under_the_rejection_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_tree(self: TreeDrafter, sequence: Any) -> GrowingTree:
        return GrowingTree(sequence, noise="own" if self.noise == "none" else self.noise)

    monkeypatch.setattr(TreeDrafter, "new_tree", new_tree)
    assert_rejected("fixed-tree")
