"""Drafts from the first layers pass their certificate; wrong layers, noise and passes do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.decoders.depth.layerskip import LayerSkip
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.sequence_data import SequenceData
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("layerskip")


def test_another_share_of_the_layers_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    build = LayerSkip.__init__
    monkeypatch.setattr(LayerSkip, "__init__", lambda self: build(self, layers=1))
    assert_rejected("layerskip")


def test_drafts_without_noise_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Sequence, sampler: Any, row: np.ndarray, position: int) -> int:
        return int(row.argmax())

    monkeypatch.setattr(Sequence, "sample", greedy)
    assert_rejected("layerskip")


def test_layers_that_run_twice_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: Sequence, tokens: list[int]) -> ScoreRequest:
        kv_cache = self.kv_cache()
        drafted = kv_cache.tokens[self.length - 1 :]
        self.truncate(self.length - 1)
        return self.score([*drafted, *tokens], rows="all")

    monkeypatch.setattr(Sequence, "complete", again)
    assert_rejected("layerskip")


def test_drafts_behind_an_end_token_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceData, "stops_at", lambda self, token: False)
    assert_rejected("layerskip")


def test_drafts_beyond_the_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceData, "remaining", 99)
    assert_rejected("layerskip")


def test_single_drafts_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    build = LayerSkip.__init__
    monkeypatch.setattr(LayerSkip, "__init__", lambda self: build(self, size=1))
    assert_rejected("layerskip")


@pytest.mark.parametrize("layers", [0, 4, 99])
def test_an_exit_beyond_the_depth_is_refused_in_one_line(layers: int) -> None:
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError) as caught:
            llm.generate("a", decoder=f"layerskip:layers={layers}")
    expected = "leaves none to verify with: the model has 4" if layers else "layers is 0; allowed"
    assert expected in str(caught.value) and "\n" not in str(caught.value)
