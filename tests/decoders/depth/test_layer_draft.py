"""Drafts from the first layers pass their certificate; wrong layers, noise and passes do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.decoders.depth.layer_draft import LayerDraft
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("layer-draft")


def test_another_share_of_the_layers_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    build = LayerDraft.__init__
    monkeypatch.setattr(LayerDraft, "__init__", lambda self: build(self, layers=1))
    assert_rejected("layer-draft")


def test_drafts_without_noise_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Sequence, sampler: Any, row: np.ndarray, position: int) -> int:
        return int(row.argmax())

    monkeypatch.setattr(Sequence, "sample", greedy)
    assert_rejected("layer-draft")


def test_layers_that_run_twice_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: Sequence, tokens: list[int]) -> ScoreRequest:
        kv_cache = self.kv_cache()
        drafted = kv_cache.tokens[self.length - 1 :]
        self.truncate(self.length - 1)
        return self.score([*drafted, *tokens], rows="all")

    monkeypatch.setattr(Sequence, "complete", again)
    assert_rejected("layer-draft")
