"""GIDD: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import Decoder, catalogue
from anydecode.decoders.diffusion import gidd
from anydecode.decoders.diffusion.posteriors import NoiseLevel, posterior
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("gidd")


@pytest.mark.parametrize("parameter", ["steps", "uniform", "corrections", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "gidd", parameter)
    assert_rejected("gidd")


@pytest.mark.parametrize("defaults", [{"uniform": 0.2}, {"temperature": 0.2}, {"corrections": 4}])
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "gidd", **defaults)
    assert_rejected("gidd")


def test_certificate_rejects_noise_of_masks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    level = gidd.noise_level
    monkeypatch.setattr(gidd, "noise_level", lambda time, uniform, size: level(time, 0.0, size))
    assert_rejected("gidd")


def test_certificate_rejects_patience_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gidd, "PATIENCE", 1)
    assert_rejected("gidd")


def test_a_posterior_of_masks_is_that_of_masked_diffusion() -> None:
    clean = np.array([0.3, 0.7, 0.0])
    found = posterior(2, clean, NoiseLevel(0.2, 0.8, 0.0), NoiseLevel(0.5, 0.5, 0.0), 2)
    assert found == pytest.approx([0.3 * 0.375, 0.7 * 0.375, 0.625])
    held = posterior(0, clean, NoiseLevel(0.2, 0.8, 0.0), NoiseLevel(0.5, 0.5, 0.0), 2)
    assert held == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("uniform=1", "below 1"),
        ("steps=0", "steps is 0; allowed are 1 to 65536"),
        ("corrections=-1", "corrections is -1; allowed are 0 to 16384"),
        ("cache=window", "compute masks; it must be one of none, prefix, dual, vicinity, block"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        catalogue.build_as(f"gidd:{parameters}", "a decoder", Decoder)
    assert isinstance(caught.value, InvalidRequestError) or "cache" in parameters
