"""Blocks that end where the text does: at a delimiter the model is sure of (Lu et al.,
"AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size", arXiv:2509.26432).
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence


class UpToDelimiter(BlockPolicy):
    """The block ends at the surest predicted delimiter within a `share` of the canvas, if its
    probability is `least` or more; else it has `size` positions. The delimiters' tokens stand in
    `canvas.memory["delimiters"]`."""

    def __init__(self, size: int, least: float, share: float = 0.25) -> None:
        if size < 1 or not 0 < share <= 1:
            raise InvalidRequestError("a block needs a position, and a share between 0 and 1")
        self.size = size
        self.least = least
        self.share = share

    def window(self, canvas: Canvas) -> int:
        return min(canvas.frontier + max(self.size, self._ahead(canvas)), len(canvas))

    def end(self, canvas: Canvas, predictions: Predictions) -> int:
        first = canvas.frontier
        delimiters = canvas.memory["delimiters"]
        near = [
            position
            for position in range(first, min(first + self._ahead(canvas), len(canvas)))
            if position in predictions and predictions.facts(position).best in delimiters
        ]
        if near:
            surest = max(
                near, key=lambda position: (predictions.facts(position).probability, -position)
            )
            if predictions.facts(surest).probability >= self.least:
                return surest + 1
        return min(first + self.size, len(canvas))

    def _ahead(self, canvas: Canvas) -> int:
        return max(1, int(self.share * (len(canvas) - canvas.memory["start"])))


class AdaBlockDenoiser(Denoiser):
    """Looks up the delimiters' tokens once."""

    delimiters = "\n"

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        encode = sequence.tokenizers[TARGET].encode
        found = [encode(mark) for mark in self.delimiters]
        canvas.memory["delimiters"] = {tokens[-1] for tokens in found if tokens}
        super().begin(sequence, canvas)


@register(
    Card(
        "adablock",
        "diffusion",
        paper="AdaBlock-dLLM (arXiv:2509.26432)",
        exactness="lossy",
        summary="Ends blocks at line breaks the model foresees, instead of every 32 tokens.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "delimiters are single characters, each the last token of its own encoding; tokens that"
            " merge one with other text do not count",
        ),
    )
)
def adablock(
    block: int = 32,
    threshold: float = 0.9,
    delimiter_threshold: float = 0.3,
    delimiters: str = "\n",
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """`block` positions where no character of `delimiters` is foreseen with at least
    `delimiter_threshold`; commits confidences of `threshold`."""
    if not delimiters:
        raise InvalidRequestError("adablock needs at least one delimiter")
    made = AdaBlockDenoiser(
        UpToDelimiter(block, delimiter_threshold),
        Confidence(),
        ThresholdUnmasking(threshold),
        cache_named(cache),
        mask=mask,
    )
    made.delimiters = delimiters
    return made
