"""The one class every decoding method derives from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from anydecode.catalogue import Card
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class Decoder(ABC):
    """Proposes tokens, has them scored, keeps some.

    One decoder serves many sequences at a time: what belongs to one sequence lives in `decode`'s
    locals, or in `sequence.state` where a restart must find it. `decode` may be closed at any yield
    and called again.
    """

    card: ClassVar[Card]
    #: Lanes besides the target that the method scores in.
    runners: tuple[str, ...] = ()
    #: Whether the method needs a causal model (True), a bidirectional one (False), or any (None).
    causal: bool | None = True
    #: Whether the draft model may have a vocabulary of its own.
    can_translate_vocab: bool = False
    #: Whether the draft model is a causal one, or a diffusion model.
    draft_causal: bool = True
    #: Whether it looks into the model's layers, so that nothing but a transformer will do.
    reads_weights: bool = False
    #: How many samples' policies it may draw from; a method that ignores the policy says False.
    can_sample: bool = True
    #: The decoder whose text an exact method says: what plain decoding means for its kind of model.
    plain: str = "autoregressive"

    @abstractmethod
    def decode(self, sequence: Sequence) -> Decoding:
        """Yield scores, emit tokens, until `sequence.finished`."""

    def prepare(self, sequence: Sequence) -> None:
        """Called once when the request is made: refuse what cannot work in one clear line
        (`UnsupportedCombinationError`), or add companion prompts and policies."""
