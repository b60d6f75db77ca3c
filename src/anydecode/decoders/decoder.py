"""The base class of every decoding method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from anydecode.catalogue import Card
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class Decoder(ABC):
    """A decoding method: yields score requests and emits tokens.

    One decoder instance serves many sequences at a time. State that belongs to one sequence is kept
    in the local variables of `decode`, or in `sequence.state` (by a `StateKey` of the
    method's own) if it must survive a restart. The engine may close `decode` at any yield and call
    it again.
    """

    card: ClassVar[Card]
    #: The model runners that the method scores with, besides "target".
    runners: tuple[str, ...] = ()
    #: Whether the method needs a causal model (True), a bidirectional one (False), or any (None).
    causal: bool | None = True
    #: Whether the draft model may have a vocabulary other than the target's.
    can_translate_vocab: bool = False
    #: Whether the draft model must be causal (True) or a diffusion model (False).
    draft_causal: bool = True
    #: Whether the method reads the weights of the model's layers, so that it needs a transformer.
    reads_weights: bool = False
    #: Whether the method samples from the request's sampler; False if it ignores the sampler.
    can_sample: bool = True
    #: The decoder whose text an exact method reproduces: plain decoding for its kind of model.
    plain: str = "autoregressive"

    @abstractmethod
    def decode(self, sequence: Sequence) -> Decoding:
        """Yield score requests and emit tokens until `sequence.finished`."""

    def prepare(self, sequence: Sequence) -> None:
        """Check the request and set up the sequence; called once, when the request is created.

        May add companion prompts or replace the sampler.

        Raises:
            UnsupportedCombinationError: The method does not work with an option of the request.
        """
