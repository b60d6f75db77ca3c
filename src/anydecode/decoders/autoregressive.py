"""Plain autoregressive decoding: one token per forward pass."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "autoregressive",
        "sampling",
        paper="",
        exactness="token-exact",
        summary="One token per forward pass; token-exact methods must reproduce its output.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
    )
)
class Autoregressive(Decoder):
    """Scores the unscored tokens and emits the token that the sampler samples."""

    requirements = Requirements(takes_embeddings=True)

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])
