"""SSD: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import Decoder, catalogue
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.chains import ChainDenoiser, Drafts
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.ssd import TreeDenoiser, ssd
from anydecode.errors import AnydecodeError
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("ssd")


def test_certificate_rejects_drafts_that_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_drafts(
        self: ChainDenoiser, canvas: Canvas, predictions: Predictions, drafts: Drafts
    ) -> list[tuple[Predictions, np.ndarray]]:
        return [(predictions, drafts.chain[[rank]]) for rank in range(len(drafts.nodes[-1]))]

    monkeypatch.setattr(ChainDenoiser, "walk", all_drafts)
    assert_rejected("ssd")


@pytest.mark.slow
def test_certificate_rejects_chains_in_place_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeDenoiser, "nodes", ChainDenoiser.nodes)
    assert_rejected("ssd")


@pytest.mark.slow
def test_certificate_rejects_steps_that_may_only_follow_the_trunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes of equal drafts in another order are not found."""
    walk = ChainDenoiser.walk

    def trunk(
        self: ChainDenoiser, canvas: Canvas, predictions: Predictions, drafts: Drafts
    ) -> list[tuple[Predictions, np.ndarray]]:
        path = walk(self, canvas, predictions, drafts)
        ranks = [int(np.flatnonzero(drafts.chain == chosen[0])[0]) for _, chosen in path]
        return path[: next((i for i, rank in enumerate(ranks) if rank != i), len(path))]

    monkeypatch.setattr(ChainDenoiser, "walk", trunk)
    assert_rejected("ssd")


def test_a_tree_has_the_drafts_that_follow_each_part_of_the_trunk() -> None:
    decoder = ssd(drafts=5, width=2)
    nodes = decoder.nodes(*[None] * 2, np.arange(9))  # type: ignore[arg-type]
    assert nodes == [(0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("width=0", "width is 0; allowed are 1 to 1024"),
        ("cache=window", "none, prefix, dual, block"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with pytest.raises(AnydecodeError, match=message):
        catalogue.build_as(f"ssd:{parameters}", "a decoder", Decoder)
