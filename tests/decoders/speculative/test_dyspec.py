"""DySpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dyspec")


@pytest.mark.parametrize("defaults", [{"size": 15}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "dyspec", **defaults)
    assert_rejected("dyspec")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "dyspec", "speculative-sampling")
    assert_rejected("dyspec")


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["none", "target"])
def test_certificate_rejects_siblings_that_are_chosen_under_the_rejection_rule(
    monkeypatch: pytest.MonkeyPatch, noise: Any
) -> None:
    """Where a rule for chosen tokens then verifies them, the text follows the target all the
    same."""

    def new_tree(self: TreeDrafter, sequence: Any) -> GrowingTree:
        if self.noise == "own":
            self.noise = noise
        return GrowingTree(sequence, noise=self.noise)

    monkeypatch.setattr(TreeDrafter, "new_tree", new_tree)
    assert_rejected("dyspec")
