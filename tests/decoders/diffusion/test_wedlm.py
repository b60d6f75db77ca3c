"""WeDLM: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.wedlm import DistancePenalisedEntropy
from certificates import assert_certified, assert_rejected, ignore_parameter


def test_certificate() -> None:
    assert_certified("wedlm")


@pytest.mark.parametrize("parameter", ["window", "entropy"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "wedlm", parameter)
    assert_rejected("wedlm")


def test_certificate_rejects_entropy_without_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistancePenalisedEntropy, "rank", Entropy.rank)
    assert_rejected("wedlm")
