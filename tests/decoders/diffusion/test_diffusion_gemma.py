"""DiffusionGemma's renoising: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode import Decoder, catalogue
from anydecode.certification.checks import measures_of
from anydecode.certification.denoising import benchmark_results
from anydecode.decoders.diffusion.diffusion_gemma import EntropyBoundedRenoising
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("diffusion-gemma")


@pytest.mark.parametrize(
    "parameter",
    ["steps", "bound", "first_temperature", "last_temperature", "stable", "settled", "block"],
)
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "diffusion-gemma", parameter)
    assert_rejected("diffusion-gemma")


@pytest.mark.parametrize(
    "defaults", [{"steps": 47}, {"bound": 0.2}, {"last_temperature": 0.5}, {"settled": 0.5}]
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "diffusion-gemma", **defaults)
    assert_rejected("diffusion-gemma")


def test_certificate_rejects_temperatures_that_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    temperature = EntropyBoundedRenoising._temperature
    monkeypatch.setattr(
        EntropyBoundedRenoising,
        "_temperature",
        lambda self, canvas: 1.2 - temperature(self, canvas),
    )
    assert_rejected("diffusion-gemma")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [("steps=0", "steps is 0; allowed are 1 to 65536"), ("bound=-1", "0 or more")],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build_as(f"diffusion-gemma:{parameters}", "a decoder", Decoder)


def test_the_measures_reject_a_canvas_that_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step, as if the first predictions from noise were final."""
    [wrong] = [one for one in measures_of("diffusion-gemma") if "wrong answers" in one.name]
    assert all(check.passed for check in wrong.checks())
    benchmark_results.cache_clear()
    replace_defaults(monkeypatch, "diffusion-gemma", steps=1)
    assert not all(check.passed for check in wrong.checks())
    benchmark_results.cache_clear()
