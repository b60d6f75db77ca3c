"""Plain decoding: one token per pass."""

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
        summary="One token per pass; what every token-exact method is held against.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
    )
)
class Autoregressive(Decoder):
    """Score what is new, say what the policy picks."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score(sequence.unscored())
            sequence.emit([scores.sampled[-1]])


@register(
    Card(
        "following",
        "sampling",
        paper="",
        exactness="token-exact",
        summary="Plain decoding that lets the kernels pick and rescore several tokens at a time.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
    )
)
class Following(Decoder):
    """Plain decoding, `count` tokens per resumption, but the first by itself."""

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            following = sequence.multi_step(self.count if sequence.tokens else 1)
            tokens = yield following
            sequence.emit(tokens, following.state)
