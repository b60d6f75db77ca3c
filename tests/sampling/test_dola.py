"""DoLa: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.dola import facts_missed
from anydecode.sampling import dola
from anydecode.sampling.dola import DoLa
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dola")


def test_certificate_rejects_a_layer_chosen_without_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dola, "divergence", lambda *row: 0.0)
    assert_rejected("dola")


def test_certificate_rejects_implausible_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = DoLa.combine

    def every_token(
        self: DoLa, logits: np.ndarray, companions: list, capture_layers: dict
    ) -> np.ndarray:
        return combine(replace(self, relative_top=1e-9), logits, companions, capture_layers)

    monkeypatch.setattr(DoLa, "combine", every_token)
    assert_rejected("dola")


def test_greedy_decoding_fails_its_measure() -> None:
    (measure,) = measures_of("dola")
    assert facts_missed(20) > measure.margin


def test_a_layer_that_is_named_many_times_is_compared_once() -> None:
    assert dola.candidate_layers([3, 1, 3] * 5000, 4) == (1, 3)


@pytest.mark.parametrize("other", [{"layers": "low"}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "dola", **other)
    assert_rejected("dola")
