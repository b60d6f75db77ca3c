"""Oracle test of FFN-SkipLLM: texts and MLPs of each token, replayed by a forward pass that
compares the states before and behind each MLP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import (
    Step,
    agreement_lost,
    layered,
    text_checks,
)
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.models.network import Network

LAYERS, FIRST, LAST, WARM_UP, THRESHOLD, COUNT = 15, 2, 1, 25, 0.98, 4


class _SkippingForward(Forward):
    def step_skipping(self, token: int, *, is_full: bool) -> tuple[np.ndarray, int]:
        """Adds a position; returns its logits and its number of MLPs."""
        x, num_mlps, quiet = self._embedding(token), 0, 0
        for layer in range(LAYERS):
            x = x + self._attention(x, layer)
            is_middle = FIRST <= layer < LAYERS - LAST and not is_full
            if is_middle and quiet:
                quiet -= 1
                continue
            y = x + self._mlp(x, layer)
            cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
            if is_middle and cosine >= THRESHOLD:
                quiet = COUNT
            x, num_mlps = y, num_mlps + 1
        return self._logits(x), num_mlps


def _replay(network: Network) -> Step:
    forward = _SkippingForward(network)

    def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
        logits, num_mlps = forward.step_skipping(token, is_full=index < WARM_UP)
        return logits, LAYERS, num_mlps

    return step


@oracle_test("ffn-skip")
def ffn_skip() -> Iterator[Check]:
    """Behind the first 25 tokens, four MLPs are skipped behind one of cosine .98 or more, but not
    in the first two fifteenths and the last tenth of the layers."""
    yield from text_checks("ffn-skip", partial(layered, LAYERS, 0.4), _replay)


@measure("ffn-skip", "share of tokens that differ from the full model's", samples=12, margin=0.3)
def ffn_skip_loss(samples: int) -> float:
    """On the full model's texts, with the method's own keys and values."""
    return agreement_lost("ffn-skip", samples)
