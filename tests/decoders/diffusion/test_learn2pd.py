"""Learn2PD: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.denoising import bidirectional, dense
from anydecode.decoders.diffusion import learn2pd
from anydecode.decoders.diffusion.learn2pd import Filter, PredictedEnd
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("learn2pd")


def test_certificate_rejects_an_ignored_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_parameter(monkeypatch, "learn2pd", "threshold")
    assert_rejected("learn2pd")


def test_certificate_rejects_a_filter_that_reads_unmasked_positions_as_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Filter.__call__
    monkeypatch.setattr(
        Filter, "__call__", lambda self, given: call(self, np.where(given == 1.0, 0.0, given))
    )
    assert_rejected("learn2pd")


def test_certificate_rejects_a_canvas_that_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PredictedEnd, "truncated_length", lambda self, canvas, predictions: None)
    assert_rejected("learn2pd")


def test_certificate_rejects_a_canvas_cut_at_the_first_predicted_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        learn2pd, "max", lambda ends, key: min(ends, key=lambda i: i), raising=False
    )
    assert_rejected("learn2pd")


def test_a_filter_of_another_model_is_refused() -> None:
    with bidirectional(dense()) as llm, pytest.raises(InvalidRequestError, match="another model"):
        llm.generate([5, 6, 7], decoder="learn2pd", max_tokens=8)
    with LLM("tiny-diffusion", dtype="int8") as llm:  # the same model in another format
        assert llm.generate("sort Leo Ada:", decoder="learn2pd", max_tokens=16).text
