"""Plain decoding: its certificate, and a mistake that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.sampling.sampler import Sampler
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("autoregressive")


def test_certificate_rejects_noise_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def late(self: Sampler, row: Any, noise: Any, position: int, *rest: Any) -> int:
        return sample(self, row, noise, position + 1, *rest)

    monkeypatch.setattr(Sampler, "sample", late)
    assert_rejected("autoregressive")
