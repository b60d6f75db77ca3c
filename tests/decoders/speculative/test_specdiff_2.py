"""SpecDiff-2: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative import specdiff_2
from anydecode.sampling.sampler import Sampler
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("specdiff-2")


@pytest.mark.parametrize("defaults", [{"size": 15}, {"paths": 3}, {"temperature": 1.4}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specdiff-2", **defaults)
    assert_rejected("specdiff-2")


def test_certificate_rejects_another_temperature_of_the_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(specdiff_2, "Sampler", lambda temperature: Sampler(1.0))
    assert_rejected("specdiff-2")
