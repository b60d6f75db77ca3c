"""Latent refinement decoding passes its certificate; wrong mixtures and stops do not."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.diffusion import lrd
from anydecode.decoders.diffusion.lrd import LatentDenoiser
from certificates import assert_certified, assert_rejected

soft, divergence = LatentDenoiser.soft, lrd.divergence


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("lrd")


def test_inputs_that_are_not_mixed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentDenoiser, "embeddings", lambda *given: None)
    assert_rejected("lrd")


def test_a_weight_that_ignores_the_entropy_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(self: LatentDenoiser, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        tokens, weights, _ = soft(self, p)
        return tokens, weights, self.mixture

    monkeypatch.setattr(LatentDenoiser, "soft", constant)
    assert_rejected("lrd")


def test_the_divergence_of_the_other_direction_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lrd, "divergence", lambda before, now: divergence(now, before))
    assert_rejected("lrd")


def test_a_mean_embedding_without_probabilities_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def even(self: LatentDenoiser, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        tokens, weights, mix = soft(self, p)
        return tokens, np.full(len(weights), 1 / len(weights)), mix

    monkeypatch.setattr(LatentDenoiser, "soft", even)
    assert_rejected("lrd")
