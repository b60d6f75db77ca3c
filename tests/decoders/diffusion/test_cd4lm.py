"""CD4LM: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode import catalogue
from anydecode.decoders.diffusion.cd4lm import DelayedEndOfText
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("cd4lm")


@pytest.mark.parametrize("parameter", ["threshold", "max_per_step", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "cd4lm", parameter)
    assert_rejected("cd4lm")


def test_certificate_rejects_an_early_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayedEndOfText, "rank", Confidence.rank)
    assert_rejected("cd4lm")


@pytest.mark.parametrize(
    ("parameter", "value"), [("min_filled", 0.45), ("min_filled", 0.55), ("max_per_step", 3)]
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "cd4lm", **{parameter: value})
    assert_rejected("cd4lm")


def test_a_share_beyond_1_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_filled must be between 0 and 1, not 2"):
        catalogue.build("cd4lm", min_filled=2)
