"""RemeDi: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.remedi import SelfReflection
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("remedi")


@pytest.mark.parametrize("parameter", ["steps", "block", "rank"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "remedi", parameter)
    assert_rejected("remedi")


def test_certificate_rejects_probabilities_in_place_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Predictions, "logits", lambda self, position: self.probabilities(int(position))
    )
    monkeypatch.setattr(
        Predictions,
        "probabilities",
        lambda self, position: self._confidence_sampler.distribution(
            self.scores.row(self._rows[position])
        ).dense(259),
    )
    assert_rejected("remedi")


def test_certificate_rejects_logits_in_place_of_confidences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SelfReflection, "_reads_confidences", lambda self, sequence: False)
    assert_rejected("remedi")


def test_certificate_rejects_one_token_more(monkeypatch: pytest.MonkeyPatch) -> None:
    num_kept = SelfReflection._num_kept
    monkeypatch.setattr(
        SelfReflection,
        "_num_kept",
        lambda self, canvas: min(num_kept(self, canvas) + 1, canvas.block_masks),
    )
    assert_rejected("remedi")
