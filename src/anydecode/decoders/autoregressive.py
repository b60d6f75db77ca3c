"""Plain autoregressive decoding: one token per forward pass."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
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

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score(sequence.unscored())
            sequence.emit([scores.sampled[-1]])


@register(
    Card(
        "multi-step",
        "sampling",
        paper="",
        exactness="token-exact",
        summary="Plain decoding in which the kernels generate several tokens before they return.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
    )
)
class MultiStep(Decoder):
    """Plain decoding with up to `count` tokens per request; the first token has its own."""

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            request = sequence.multi_step(self.count if sequence.tokens else 1)
            tokens = yield request
            sequence.emit(tokens, request.sampler)
