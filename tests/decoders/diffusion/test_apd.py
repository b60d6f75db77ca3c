"""Adaptive parallel decoding passes its certificate; wrong second samples do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.decoders.diffusion.apd import JointDenoiser
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected

joint = JointDenoiser.joint


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("apd")


def test_a_greedy_second_sample_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: JointDenoiser, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        best = np.arange(len(p)) == joint(self, p, q).argmax()
        return np.where(best, np.float32(0), np.float32(-np.inf))

    monkeypatch.setattr(JointDenoiser, "joint", greedy)
    assert_rejected("apd")


def test_a_second_sample_with_other_noise_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, products = Sequence.sample, []

    def remembered(self: JointDenoiser, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        products.append(joint(self, p, q))
        return products[-1]

    def independent(self: Sequence, sampler: Any, row: np.ndarray, *where: int) -> int:
        if products and row is products[-1]:
            where = where[0], where[1] + 1000
        return sample(self, sampler, row, *where)

    monkeypatch.setattr(JointDenoiser, "joint", remembered)
    monkeypatch.setattr(Sequence, "sample", independent)
    assert_rejected("apd")
