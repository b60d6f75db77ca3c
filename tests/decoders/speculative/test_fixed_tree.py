"""Trees of a fixed shape: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

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
