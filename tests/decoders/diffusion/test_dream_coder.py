"""Dream-Coder: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.diffusion.dream_coder import VariableInfilling
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dream-coder")


@pytest.mark.parametrize("parameter", ["expand", "steps"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "dream-coder", parameter)
    assert_rejected("dream-coder")


def test_certificate_rejects_regions_of_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VariableInfilling, "_resize", lambda self, sequence, canvas, position: None)
    assert_rejected("dream-coder")


def test_certificate_rejects_an_end_of_text_that_removes_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        VariableInfilling,
        "_ended",
        staticmethod(lambda canvas, position, stop: np.arange(position + 1, stop)),
    )
    assert_rejected("dream-coder")
