"""FreeDave: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import Decoder, catalogue
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.chains import ChainDenoiser, Drafts
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import AnydecodeError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("freedave")


@pytest.mark.slow
@pytest.mark.parametrize("parameter", ["block", "ahead", "threshold"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "freedave", parameter)
    assert_rejected("freedave")


def test_certificate_rejects_drafts_that_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_drafts(
        self: ChainDenoiser, canvas: Canvas, predictions: Predictions, drafts: Drafts
    ) -> list[tuple[Predictions, np.ndarray]]:
        return [(predictions, drafts.chain[[rank]]) for rank in range(len(drafts.nodes[-1]))]

    monkeypatch.setattr(ChainDenoiser, "walk", all_drafts)
    assert_rejected("freedave")


@pytest.mark.slow
def test_certificate_rejects_drafts_of_the_next_block_before_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Confidence alone decides, whatever the block."""
    monkeypatch.setattr(FixedBlocks, "end_of_block", lambda self, canvas, position: len(canvas))
    assert_rejected("freedave")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("ahead=-1", "ahead is -1; allowed are 0 to 1024"),
        ("ahead=1,cache=dual", "cache=none or cache=block"),
        ("threshold=2", "between 0 and 1"),
        ("threshold=0.9,remasking=margin", "remasking=confidence"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(AnydecodeError, match=message):
        catalogue.build_as(f"freedave:{parameters}", "a decoder", Decoder)
