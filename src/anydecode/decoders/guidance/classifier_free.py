"""Classifier-free guidance for language models (Sanchez et al., arXiv:2306.17806)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.autoregressive import Autoregressive
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.guidance import Guidance
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "classifier-free-guidance",
        "alignment",
        paper="Stay on topic with Classifier-Free Guidance (arXiv:2306.17806)",
        exactness="lossy",
        summary="Each token is scored with and without the prompt, and the difference stretched."
        " This changes the distribution by design; drafts under it do not change its text.",
        works_with=("constraints", "samplers", "speculation", "beams", "batches", "adapters"),
    )
)
class ClassifierFreeGuidance(Decoder):
    """`inner` decoding (default: plain) under a policy that asks for a companion context.

    The companion sees `negative`, a list of tokens, in place of the prompt; by default the last
    token of the prompt alone, as the paper does.
    """

    def __init__(
        self,
        scale: float = 1.5,
        negative: list[int] | None = None,
        inner: Decoder | None = None,
    ) -> None:
        if not all(isinstance(token, int) for token in negative or ()):
            raise InvalidRequestError(f"negative is a list of token ids, not {negative!r}")
        self.scale = scale
        self.negative = negative
        self.inner = inner or Autoregressive()
        self.runners = self.inner.runners

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if sampler.combiner is not None:
            raise UnsupportedCombinationError("guidance cannot be combined with another combiner")
        sequence.companion_prompts = [list(self.negative or sequence.prompt[-1:])]
        sequence.sampler = Sampler(
            sampler.temperature,
            sampler.pre_temperature,
            sampler.post_temperature,
            Guidance(self.scale),
        )
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        return self.inner.decode(sequence)
