"""Oracle test of SkipDecode: texts and layers of each token, replayed by a forward pass whose
number of layers follows from the position."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import (
    LENGTH,
    Step,
    agreement_lost,
    layered,
    text_checks,
)
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.models.network import Network

LAYERS, MAX_LAYERS, MIN_LAYERS = 12, 8, 4


class _ChosenLayers(Forward):
    def step_through(self, token: int, layers: list[int]) -> np.ndarray:
        """Adds a position that runs these layers; returns its logits."""
        x = self._embedding(token)
        for layer in layers:
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
        return self._logits(x)


def _replay(network: Network) -> Step:
    forward = _ChosenLayers(network)

    def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
        count = LAYERS
        if index >= 0:
            count = round(MAX_LAYERS - index / LENGTH * (MAX_LAYERS - MIN_LAYERS) + 1e-9)
        layers = [0, *range(LAYERS - count + 1, LAYERS)]
        return forward.step_through(token, layers), count, count

    return step


@oracle_test("skipdecode")
def skipdecode() -> Iterator[Check]:
    """The first layer, and the last ones: two thirds of all layers at first, and a third at the
    limit of tokens."""
    yield from text_checks("skipdecode", partial(layered, LAYERS, 0.3), _replay)


@measure("skipdecode", "share of tokens that differ from the full model's", samples=12, margin=0.4)
def skipdecode_loss(samples: int) -> float:
    """On the full model's texts, with the method's own keys and values."""
    return agreement_lost("skipdecode", samples)
