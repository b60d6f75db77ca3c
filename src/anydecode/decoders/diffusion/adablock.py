"""AdaBlock (Lu et al., "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block
Size", arXiv:2509.26432).

The block ends at the delimiter (by default a line break) that the model predicts with the highest
probability, if this is high enough. Otherwise the block has a fixed size.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence


class DelimiterBlocks(BlockPolicy):
    """Blocks that end at a predicted delimiter.

    The delimiter tokens are in `canvas.policy_state["delimiters"]`.

    Args:
        size: Positions per block if no delimiter is predicted.
        min_probability: The smallest probability of a predicted delimiter.
        share: The share of the canvas, from the first mask on, in which delimiters are searched.
    """

    def __init__(self, size: int, min_probability: float, share: float = 0.25) -> None:
        if size < 1 or not 0 < share <= 1:
            raise InvalidRequestError("adablock needs block >= 1 and 0 < share <= 1")
        self.size = size
        self.min_probability = min_probability
        self.share = share

    def window_end(self, canvas: Canvas) -> int:
        return min(canvas.frontier + max(self.size, self._search_length(canvas)), len(canvas))

    def block_end(self, canvas: Canvas, predictions: Predictions) -> int:
        first = canvas.frontier
        delimiters = canvas.policy_state["delimiters"]
        candidates = [
            position
            for position in range(first, min(first + self._search_length(canvas), len(canvas)))
            if position in predictions and predictions.statistics(position).best in delimiters
        ]
        if candidates:
            likeliest = max(
                candidates,
                key=lambda position: (predictions.statistics(position).probability, -position),
            )
            if predictions.statistics(likeliest).probability >= self.min_probability:
                return likeliest + 1
        return min(first + self.size, len(canvas))

    def _search_length(self, canvas: Canvas) -> int:
        return max(1, int(self.share * (len(canvas) - canvas.policy_state["start"])))


class AdaBlockDenoiser(Denoiser):
    """Encodes the delimiters into tokens when the canvas is created."""

    delimiters = "\n"

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        encode = sequence.tokenizers[TARGET].encode
        encoded = [encode(character) for character in self.delimiters]
        canvas.policy_state["delimiters"] = {tokens[-1] for tokens in encoded if tokens}
        super().begin(sequence, canvas)


@register(
    Card(
        "adablock",
        "diffusion",
        paper="AdaBlock-dLLM (arXiv:2509.26432)",
        exactness="lossy",
        summary="Ends blocks at predicted line breaks instead of every 32 tokens.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "a delimiter is a single character; only the last token of its own encoding counts, not"
            " tokens that contain it together with other text",
        ),
        remote={
            "block": Range(1, 4096),
            "threshold": Range(0, 1),
            "delimiter_threshold": Range(0, 1),
            "delimiters": Text(16),
            "cache": CACHE_WORDS,
        },
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
    """Denoises in blocks that end at predicted delimiters.

    Args:
        block: Positions per block if no delimiter is predicted.
        threshold: Masks with at least this confidence are unmasked.
        delimiter_threshold: The smallest probability of a predicted delimiter.
        delimiters: The delimiters, one character each.
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if not delimiters:
        raise InvalidRequestError("adablock needs at least one delimiter")
    decoder = AdaBlockDenoiser(
        DelimiterBlocks(block, delimiter_threshold),
        Confidence(),
        ThresholdUnmasking(threshold),
        cache_named(cache),
        mask=mask,
    )
    decoder.delimiters = delimiters
    return decoder
