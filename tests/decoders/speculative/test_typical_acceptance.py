"""Typical acceptance passes its certificate; wrong thresholds do not."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.framework.acceptance import TypicalAcceptance
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("typical-acceptance")


def test_swapped_thresholds_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TypicalAcceptance.__init__
    monkeypatch.setattr(
        TypicalAcceptance, "__init__", lambda self, epsilon, delta: build(self, delta, epsilon)
    )
    assert_rejected("typical-acceptance")


def test_an_entropy_in_bits_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(self: TypicalAcceptance, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        positive = p[p > 0]
        entropy = -float((positive * np.log2(positive)).sum())
        bound = min(self.epsilon, self.delta * float(np.exp(-entropy)))
        return [bool(p[token] > bound) for token in tokens]

    monkeypatch.setattr(TypicalAcceptance, "passes", passes)
    assert_rejected("typical-acceptance")
