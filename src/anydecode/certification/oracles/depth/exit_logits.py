"""The logits of a Llama after any number of its layers, text by text."""

from __future__ import annotations

import numpy as np

from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.models.network import Network


class ExitLogits:
    """Logits float64 `[vocab_size]` behind a text, after some of the first layers; computed
    once."""

    def __init__(self, network: Network) -> None:
        self.num_layers = len(network.weights.layers)
        self._forward, self._tokens = Forward(network), list[int]()
        self._logits: dict[tuple[int, ...], list[np.ndarray]] = {}

    def __call__(self, seen: tuple[int, ...], layers: int) -> np.ndarray:
        if seen not in self._logits:
            common = 0
            while common < len(seen) - 1 and self._tokens[common : common + 1] == [seen[common]]:
                common += 1
            for rows in (*self._forward.keys, *self._forward.values):
                del rows[common:]
            for end in range(common, len(seen)):
                logits = self._forward.exits(seen[end], range(1, self.num_layers + 1))
                self._logits[seen[: end + 1]] = logits
            self._tokens = list(seen)
        return self._logits[seen][layers - 1]
