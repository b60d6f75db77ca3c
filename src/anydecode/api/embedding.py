"""Text embeddings: the mean of the last hidden states, computed by a decoder that generates
nothing."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence

#: Rows per request.
CHUNK = 256


class MeanState(Decoder):
    """The mean over all tokens of the hidden state after the last layer, before the final norm."""

    requirements = Requirements(causal=None)

    def __init__(self) -> None:
        self._sum: np.ndarray | None = None

    def decode(self, sequence: Sequence) -> Decoding:
        kv_cache = sequence.kv_cache()
        kv_cache.truncate(0)
        depth = kv_cache.pool.model.spec.num_layers
        tokens, total = sequence.prompt, None
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            request = sequence.score(part, runner=TARGET, rows="all", hidden=(depth,))
            for spans in request.groups:
                for span in spans:
                    span.logits = False
            scores = yield request
            rows = scores.hidden[depth].astype(np.float64).sum(0)
            total = rows if total is None else total + rows
        assert total is not None
        self._sum = total / len(tokens)

    def vector(self) -> list[float]:
        """The mean, scaled to length 1, `[hidden_size]`. Available when the request is done."""
        assert self._sum is not None
        unit: list[float] = (self._sum / max(float(np.linalg.norm(self._sum)), 1e-12)).tolist()
        return unit
