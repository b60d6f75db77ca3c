"""FFN-SkipLLM: MLPs are skipped where they have stopped changing the hidden state (Jaiswal et al.,
"FFN-SkipLLM: A Hidden Gem for Autoregressive Decoding with Adaptive Feed Forward Skipping",
arXiv:2404.03865)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.fewer_layers import FewerLayers
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import SkippedParts, Variant
from anydecode.kernels.routes import Route, RoutedPass
from anydecode.scoring.sequence import Sequence


class SkippedMlps(Route):
    """Rows skip MLPs behind one that hardly changed their state; see `FfnSkip`."""

    def __init__(self, threshold: float, count: int | None, first: int, end: int) -> None:
        self.threshold, self.count, self.first, self.end = threshold, count, first, end

    def run(self, routed: RoutedPass) -> None:
        rows, num_layers = np.arange(len(routed.states)), routed.num_layers
        parts = frozenset(range(num_layers))
        attention, mlp = SkippedParts(mlps=parts), SkippedParts(mixers=parts)
        resumes = np.full(len(rows), self.first)  # the layer whose MLP each row runs next
        routed.run(rows, 0, self.first)
        layer = self.first
        while layer < self.end:
            # All rows run the attention together: they store their keys before any row reads.
            following = max(layer + 1, int(resumes.min())) if len(rows) else self.end
            following = min(following, self.end)
            is_skipped = bool((resumes >= following).all())
            routed.run(rows, layer, following if is_skipped else layer + 1, attention)
            if is_skipped:
                layer = following
                continue
            active = np.flatnonzero(resumes <= layer)
            before = routed.states[active]
            routed.run(active, layer, layer + 1, mlp)
            routed.count(active, 0, 1)
            is_close = cosines(before, routed.states[active]) >= self.threshold
            skips = num_layers if self.count is None else self.count
            resumes[active] = np.where(is_close, layer + 1 + skips, layer + 1)
            layer += 1
        routed.run(rows, self.end, num_layers)
        routed.count(rows, num_layers, self.first + num_layers - self.end)
        routed.stop(rows, num_layers)


def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cosine of each row of x with that of y, float64 `[rows]`."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    norms = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    result: np.ndarray = (x * y).sum(-1) / np.maximum(norms, 1e-30)
    return result


@register(
    Card(
        "ffn-skip",
        "depth",
        paper="Jaiswal et al. 2024, FFN-SkipLLM (arXiv:2404.03865)",
        exactness="lossy",
        summary="Skips MLPs of middle layers behind one that hardly changes the hidden state.",
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "0.81 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 77.6%"
            " of tokens as the full model: states are compared between the calls of each layer"
            " (AMD EPYC, 2 cores; `anydecode bench depth`, docs/performance.md)",
            "1.51 times the speed of plain decoding on early-8b.Q4_0 with first=14, last=1,"
            " count=99 and warm_up=0, with 97.9% of tokens as the full model (random weights whose"
            " exits agree often; AMD EPYC with AVX2, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
        ),
        deviations=(
            "the threshold and the number of skipped MLPs are not known: by default 0.98, about"
            " the 80th percentile of the default model's middle layers, and 4",
            "the first and last layers that always run are shares of the depth, not the result of a"
            " calibration",
        ),
        remote={
            "threshold": Range(-1, 2),
            "count": Range(0, 1024),
            "warm_up": Range(0, 1 << 20),
            "first": Range(0, 1024),
            "last": Range(0, 1024),
        },
    )
)
class FfnSkip(FewerLayers):
    """Skips MLPs behind one whose output has a high cosine with its input, the residual included.

    Attention always runs, so later tokens find keys and values in every layer.

    Args:
        threshold: The cosine from which on MLPs are skipped. Above 1 none is.
        count: How many MLPs are skipped before one runs again; None: all up to the last layers.
        warm_up: The first generated tokens, which run in full.
        first: Layers at the bottom whose MLPs always run (default: two fifteenths of them).
        last: Layers at the top whose MLPs always run (default: a tenth of them).
    """

    def __init__(
        self,
        threshold: float = 0.98,
        count: int | None = 4,
        warm_up: int = 25,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        if min(one for one in (count, warm_up, first, last, 0) if one is not None) < 0:
            raise InvalidRequestError(
                "ffn-skip needs count, warm_up, first and last of at least 0, not"
                f" count={count}, warm_up={warm_up}, first={first}, last={last}"
            )
        self.threshold, self.count, self.warm_up = threshold, count, warm_up
        self.first, self.last = first, last
        self._routes: dict[int, SkippedMlps] = {}

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        if index < self.warm_up:
            return None
        num_layers = sequence.num_layers
        if num_layers not in self._routes:
            self._routes[num_layers] = SkippedMlps(
                self.threshold, self.count, *self._middle(num_layers)
            )
        return self._routes[num_layers]

    def _middle(self, num_layers: int) -> tuple[int, int]:
        """The first of the layers that may skip, and their end."""
        first = max(1, 2 * num_layers // 15) if self.first is None else self.first
        last = max(1, num_layers // 10) if self.last is None else self.last
        return first, num_layers - last

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        first, end = self._middle(sequence.num_layers)
        if first >= end:
            raise InvalidRequestError(
                f"ffn-skip leaves no layer between the first {first} and the last of a model of"
                f" {sequence.num_layers}; choose less for first and last"
            )
