"""Text as one vector: the mean of the last hidden states, by a decoder that says nothing."""

from __future__ import annotations

import torch

from anydecode.decoders.decoder import Decoder
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence

#: Rows asked for at a time.
CHUNK = 256


class MeanState(Decoder):
    """The mean over all tokens of the state after the last layer, before the final norm."""

    causal = None

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def decode(self, sequence: Sequence) -> Decoding:
        context = sequence.context()
        context.truncate(0)
        depth = context.pool.model.spec.num_layers
        tokens, total = sequence.prompt, None
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            score = sequence.score(part, runner=TARGET, rows="all", hidden=(depth,))
            for spans in score.groups:
                for span in spans:
                    span.logits = False
            scores = yield score
            rows = scores.hidden[depth].double().sum(0)
            total = rows if total is None else total + rows
        assert total is not None
        self._sum = total / len(tokens)

    def vector(self) -> list[float]:
        """The mean, scaled to length 1, once the engine has run it."""
        assert self._sum is not None
        unit: list[float] = (self._sum / self._sum.norm().clamp_min(1e-12)).tolist()
        return unit
