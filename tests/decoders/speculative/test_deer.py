"""DEER passes its certificate; wrong ways to draft the block do not."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from anydecode.decoders.speculative.diffusion_draft import DiffusionSession
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected

marginals = DiffusionSession.marginals


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("deer")


def test_rows_that_are_one_position_late_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: DiffusionSession, count: int) -> Generator[Any, Any, list[np.ndarray]]:
        rows = yield from marginals(self, count + 1)
        return rows[1:]

    monkeypatch.setattr(DiffusionSession, "marginals", late)
    assert_rejected("deer")


def test_drafts_sampled_with_other_noise_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def independent(self: Sequence, sampler: Any, row: np.ndarray, position: int) -> int:
        noise = self.noise.with_purpose("draft").gumbel(range(len(row)), position)
        scores = sampler.distribution(row).dense(len(row))
        with np.errstate(divide="ignore"):
            return int((np.log(scores) + noise).argmax())

    monkeypatch.setattr(Sequence, "sample", independent)
    assert_rejected("deer")
