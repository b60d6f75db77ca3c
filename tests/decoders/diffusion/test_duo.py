"""Duo: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Decoder, catalogue
from anydecode.certification.denoising import bidirectional, dense
from anydecode.decoders.diffusion import duo
from anydecode.decoders.diffusion.uniform import UniformDenoiser
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("duo")


@pytest.mark.slow
@pytest.mark.parametrize("parameter", ["steps", "kappa", "block", "rho", "read_out_sigma"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "duo", parameter)
    assert_rejected("duo")


def test_certificate_rejects_a_prediction_in_place_of_the_posterior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a position holds is forgotten."""
    monkeypatch.setattr(duo, "posterior", lambda held, clean, now, later, mask: clean)
    assert_rejected("duo")


def test_certificate_rejects_a_canvas_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniformDenoiser, "noise", lambda *given: 0)
    assert_rejected("duo")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("kappa=2", "between 0 and 1"),
        ("steps=0", "steps is 0; allowed are 1 to 65536"),
        ("rho=0", "rho must be greater than 0"),
        ("read_out=true,read_out_sigma=-1", "read_out_sigma must be 0 or more"),
        ("read_out_sigma=0.7", "read_out_sigma needs read_out=true"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build_as(f"duo:{parameters}", "a decoder", Decoder)


@pytest.mark.parametrize("decoder", ["duo:steps=4", "diffusion-gemma:steps=4,block=8"])
def test_a_model_needs_no_mask_token(decoder: str) -> None:
    with bidirectional(dense()) as llm:
        tokenizer: Any = llm.tokenizer
        tokenizer.mask_id = None
        answer = llm.generate([5, 6, 7], decoder=decoder, max_tokens=20, ignore_eos=True)
        assert len(answer.tokens) == 20
        with pytest.raises(InvalidRequestError, match="no mask token"):
            llm.generate([5, 6, 7], decoder="llada", max_tokens=8)
