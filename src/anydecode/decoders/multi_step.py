"""Plain decoding with several tokens per request: the kernels sample and continue by themselves."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "multi-step",
        "sampling",
        paper="",
        exactness="token-exact",
        summary="Plain decoding in which the kernels generate several tokens before they return.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        remote={"count": Range(1, 64)},
    )
)
class MultiStep(Decoder):
    """Plain decoding with several tokens per request; the first token has its own.

    Args:
        count: Maximum number of tokens per request.
    """

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            request = sequence.multi_step(self.count if sequence.tokens else 1)
            tokens = yield request
            sequence.emit(tokens, request.sampler)
