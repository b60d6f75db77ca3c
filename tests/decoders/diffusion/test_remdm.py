"""ReMDM: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import Decoder, catalogue
from anydecode.decoders.diffusion.remdm import Remasking
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("remdm")


@pytest.mark.parametrize("parameter", ["strategy", "eta", "steps", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "remdm", parameter)
    assert_rejected("remdm")


def test_certificate_rejects_another_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "remdm", eta=0.02)
    assert_rejected("remdm")


def test_certificate_rejects_confidence_that_attracts_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sigma = Remasking.sigma
    monkeypatch.setattr(
        Remasking,
        "sigma",
        lambda self, now, later, confidence, masked: sigma(self, now, later, -confidence, masked),
    )
    assert_rejected("remdm")


@pytest.mark.parametrize("strategy", ["cap", "rescale", "loop", "backward"])
def test_the_expected_share_of_tokens_is_kept(strategy: str) -> None:
    decoder = catalogue.build("remdm", strategy=strategy)
    assert isinstance(decoder, Remasking)
    shares = [decoder.share(1 - k / 20) for k in range(21)]
    for now, later in zip(shares, shares[1:], strict=False):
        sigma = float(decoder.sigma(now, later, np.ones(1), np.zeros(1, bool))[0])
        unmasks = 1.0 if now == 1 else (later - (1 - sigma) * now) / (1 - now)
        assert 0 <= sigma <= 1 and -1e-12 <= unmasks <= 1 + 1e-12
        assert now * (1 - sigma) + (1 - now) * unmasks == pytest.approx(later)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("strategy=none", "cap, rescale"),
        ("eta=2", "between 0 and 1"),
        ("steps=0", "steps is 0; allowed are 1 to 65536"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build_as(f"remdm:{parameters}", "a decoder", Decoder)
