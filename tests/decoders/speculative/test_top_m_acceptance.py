"""Top-m acceptance passes its certificate; wrong ranks do not."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.framework import acceptance
from anydecode.decoders.framework.acceptance import ThresholdAcceptance, TopMAcceptance
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("top-m-acceptance")


def test_one_more_rank_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = acceptance._rank

    def from_one(p: np.ndarray, token: int) -> int:
        return max(0, rank(p, token) - 1)

    monkeypatch.setattr(acceptance, "_rank", from_one)
    assert_rejected("top-m-acceptance")


def test_ranks_after_the_temperature_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TopMAcceptance, "target_distribution", ThresholdAcceptance.target_distribution
    )
    assert_rejected("top-m-acceptance")
