"""Classifier-free guidance for language models (Sanchez et al., arXiv:2306.17806).

Each token is scored under the prompt and under a negative prompt, and the difference of the two is
scaled.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
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
        summary="Scores each token with and without the prompt and scales the difference. This"
        " changes the distribution by design; speculation with it does not change its text.",
        works_with=("constraints", "samplers", "speculation", "beams", "batches", "adapters"),
        remote={"scale": Range(0, 100)},
    )
)
class ClassifierFreeGuidance(Decoder):
    """Decodes with `inner` under a sampler that combines the logits of two contexts.

    Args:
        scale: The factor of the difference; 1 is plain decoding.
        negative: The token ids of the negative prompt (default: the last token of the prompt
            alone, as in the paper).
        inner: The decoder that generates (default: `Autoregressive`).
    """

    def __init__(
        self,
        scale: float = 1.5,
        negative: list[int] | None = None,
        inner: Decoder | None = None,
    ) -> None:
        if not all(isinstance(token, int) for token in negative or ()):
            raise InvalidRequestError(f"negative must be a list of token ids, not {negative!r}")
        self.scale = scale
        self.negative = negative
        self.inner = inner or Autoregressive()
        self.requirements = self.inner.requirements

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if sampler.combiner is not None:
            raise UnsupportedCombinationError(
                "guidance cannot be combined with another combination of logits"
            )
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
