"""Block diffusion (bd3-lm): its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.rankings import Confidence, Random
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("bd3-lm")


def test_certificate_rejects_the_most_confident_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Random, "rank", Confidence.rank)
    assert_rejected("bd3-lm")
