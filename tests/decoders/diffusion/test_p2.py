"""P2: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.p2 import PathPlanning
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("p2")


@pytest.mark.parametrize("parameter", ["steps", "block", "eta", "planner"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "p2", parameter)
    assert_rejected("p2")


def test_certificate_rejects_tokens_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only masks are planned, as in decoding without revision."""
    monkeypatch.setattr(
        PathPlanning, "free_positions", staticmethod(lambda canvas: canvas.masked(*canvas.block))
    )
    assert_rejected("p2")


def test_certificate_rejects_a_plan_that_keeps_the_least_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Confidence.rank
    monkeypatch.setattr(Confidence, "rank", lambda *given: -rank(*given))
    assert_rejected("p2")


def test_certificate_rejects_a_planner_that_sees_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner reads the canvas as it was before the samples."""
    monkeypatch.setattr(Canvas, "copy_tokens", lambda self, *changes: self.tokens.copy())
    assert_rejected("p2")


def test_certificate_rejects_a_weight_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is for tokens; of masks and tokens alike it would change nothing."""
    weighted = PathPlanning._weighted
    monkeypatch.setattr(
        PathPlanning,
        "_weighted",
        lambda self, ranks, positions, was_masked, planned: weighted(
            self, ranks, positions, np.zeros_like(was_masked), planned
        ),
    )
    assert_rejected("p2")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("eta=-1", "eta must be 0 or more"),
        ("planner=bert", "planner must be one of self, draft"),
        ("planner=draft,remasking=entropy", "needs planner=self"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with LLM("tiny-diffusion") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", decoder=f"p2:{parameters}")


def test_a_planner_is_a_bidirectional_model_of_the_same_vocabulary() -> None:
    for size, causal, message in ((259, True, "bidirectional"), (300, False, "vocabulary")):
        target = ScriptedModel(causal=False)
        draft = ScriptedModel(vocab_size=size, causal=causal)
        with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=512) as llm:
            with pytest.raises(AnydecodeError, match=message):
                llm.generate([5, 6], decoder="p2:planner=draft", max_tokens=8)
