"""Adaptive parallel decoding passes its certificate; wrong second samples do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.denoising import bidirectional, dense
from anydecode.certification.oracles.diffusion.apd import cached_windows
from anydecode.decoders.diffusion.apd import JointDenoiser
from anydecode.decoders.diffusion.approximate_caches import RecentCachePolicy
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import ScriptedModel
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


@pytest.mark.parametrize("mistake", ["forgets new tokens", "one token less", "sees masks after"])
def test_other_cached_rows_are_rejected(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "sees masks after":
        span = RecentCachePolicy.span

        def whole(self: Any, canvas: Any, kv_cache: Any, tokens: Any, region: Any) -> Any:
            return span(self, canvas, kv_cache, tokens, (region[0], len(canvas)))

        monkeypatch.setattr(RecentCachePolicy, "span", whole)
    else:

        def on_pass(self: RecentCachePolicy, canvas: Any, region: tuple[int, int]) -> None:
            late = mistake == "forgets new tokens"
            canvas.policy_state["recent"] = region[0] + (2 if late else 1)

        monkeypatch.setattr(RecentCachePolicy, "on_pass", on_pass)
    assert not all(check.passed for check in cached_windows())


def test_a_cached_window_needs_a_model_without_blocks() -> None:
    draft = ScriptedModel()
    with bidirectional(dense(), block_size=4, draft=draft) as llm:
        with pytest.raises(AnydecodeError, match="see blocks of 4"):
            llm.generate([5, 6], decoder="apd:recent=4", max_tokens=8)
        with pytest.raises(AnydecodeError, match="recent is 0; allowed are 1 to 65536"):
            llm.generate([5, 6], decoder="apd:recent=0", max_tokens=8)
