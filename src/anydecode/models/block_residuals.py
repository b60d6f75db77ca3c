"""Attention residuals (Kimi Team, 2026, arXiv:2607.24653), as in Kimi K3.

The hidden states of a row are streams of `hidden_size` numbers, side by side: first the sum of the
outputs of the current block of layers, then the sums of the blocks before it, of which the first is
the embedding. Those of blocks to come are zero. A sublayer reads the sum of these streams, weighted
by a softmax over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.spec import ModelSpec


@dataclass(eq=False)
class BlockResiduals:
    """The scores of streams before the sublayers of a layer, `[1, hidden_size]` each. The first
    sublayer of the first layer reads the embedding alone."""

    mixer: Weight | None
    mlp: Weight

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [self.mlp] if self.mixer is None else [self.mixer, self.mlp]


def weighted_sum(backend: Backend, streams: Any, count: int, score: Weight, spec: ModelSpec) -> Any:
    """The sum of the first `count` streams: the scores are the products of `score` with them,
    normed."""
    x = backend.columns(streams, 0, count * spec.hidden_size)
    normed = backend.rms_norm(x, None, spec.norm_eps, count)
    shares = backend.softmax(backend.grouped_linear(normed, [score] * count))
    return backend.collapse(x, shares, count)


def with_stream(backend: Backend, streams: Any, index: int, value: Any, spec: ModelSpec) -> Any:
    """The streams with `value` in place of the one at `index`."""
    size, count = spec.hidden_size, spec.num_streams
    found = value
    if index:
        found = backend.join(backend.columns(streams, 0, index * size), found)
    if index + 1 < count:
        behind = backend.columns(streams, (index + 1) * size, (count - index - 1) * size)
        found = backend.join(found, behind)
    return found
