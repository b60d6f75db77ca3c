"""Learn2PD (Bao et al., "Learning to Parallel: Accelerating Diffusion Large Language Models via
Learnable Parallel Decoding", arXiv:2509.25188).

A small trained filter predicts from the confidences of a block which predictions are final; these
are unmasked. The canvas is cut where an end of text is predicted. `anydecode train filter` trains a
filter.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import CACHE_WORDS
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError

SHIPPED = Path(__file__).parents[2] / "assets" / "tiny-diffusion" / "learn2pd.safetensors"
_TENSORS = ("hidden.weight", "hidden.bias", "output.weight", "output.bias")


class Filter:
    """A network of two layers over the confidences of a block; unmasked positions count as 1."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.hidden, self.hidden_bias, self.output, self.output_bias = (
            tensors[name].astype(np.float64) for name in _TENSORS
        )

    @property
    def size(self) -> int:
        """Positions of a block."""
        return int(self.hidden.shape[1])

    def __call__(self, confidences: np.ndarray) -> np.ndarray:
        """The probability that each position's prediction is final, float64 `[size]`."""
        hidden = np.maximum(self.hidden @ confidences + self.hidden_bias, 0.0)
        result: np.ndarray = 1 / (1 + np.exp(-(self.output @ hidden + self.output_bias)))
        return result


@cache
def load(path: Path) -> Filter:
    """Load a filter from a safetensors file.

    Raises:
        InvalidRequestError: There is no such file, or its tensors are not those of a filter.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        loaded = Filter(tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise InvalidRequestError(f"{path} is not a filter for learn2pd: {error}") from None
    size = loaded.size
    if loaded.output.shape != (size, len(loaded.hidden)) or loaded.output_bias.shape != (size,):
        raise InvalidRequestError(
            f"{path} is not a filter for learn2pd: the shapes of its tensors do not match"
        )
    return loaded


class FilterUnmasking(UnmaskPolicy):
    """Unmasks the masks that are final with a probability above `threshold`."""

    def __init__(self, filter: Filter, threshold: float) -> None:
        self.filter = filter
        self.threshold = threshold

    def on_block_opened(self, canvas: Canvas) -> None:
        if canvas.block_size is not None and canvas.block_size > self.filter.size:
            raise InvalidRequestError(
                f"this filter is for blocks of {self.filter.size} positions, but the model's have"
                f" {canvas.block_size}"
            )

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        confidences = np.ones(self.filter.size)
        offsets = positions - canvas.block[0]
        confidences[offsets] = ranks
        chosen: np.ndarray = self.filter(confidences)[offsets] > self.threshold
        return chosen


class FilterBlocks(FixedBlocks):
    """Blocks of the filter's size. If the canvas is shorter, the rest counts as unmasked."""

    def check_length(self, length: int) -> None:
        pass


class PredictedEnd(EndOfText):
    """Cuts the canvas after a committed end of text, or else after a predicted one.

    An end of text is predicted where it is the most likely token of a mask that is not the first
    position of the answer. Of several the most probable one counts.
    """

    needs_all_masks = True

    def extra_positions(self, canvas: Canvas) -> np.ndarray:
        return canvas.masks

    def truncated_length(self, canvas: Canvas, predictions: Predictions) -> int | None:
        length = super().truncated_length(canvas, predictions)
        if length is not None:
            return length
        ends = [
            position
            for position in canvas.masks.tolist()
            if position > canvas.policy_state["start"]
            and position in predictions
            and predictions.sequence.stops_at(predictions.statistics(position).best)
        ]
        if not ends:
            return None
        likeliest = max(
            ends, key=lambda position: (predictions.statistics(position).probability, -position)
        )
        return likeliest + 1 if likeliest + 1 < len(canvas) else None


@register(
    Card(
        "learn2pd",
        "diffusion",
        paper="Learning to Parallel (arXiv:2509.25188)",
        exactness="lossy",
        summary="A trained filter selects final tokens; cuts the canvas at a predicted end.",
        needs=("diffusion model", "trained heads"),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the included filter was trained on tiny-diffusion; other models need their own",
            "the predicted end of text itself stays on the canvas",
        ),
        remote={"threshold": Range(0, 1), "cache": CACHE_WORDS},
    )
)
def learn2pd(
    filter: str | Path | None = None,
    threshold: float = 0.96,
    foresee_end: bool = True,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with a trained filter.

    Args:
        filter: The filter, a safetensors file (default: the included one).
        threshold: Masks that are final with a probability above it are unmasked.
        foresee_end: Cut the canvas where an end of text is predicted.
        cache: "none", "prefix" or "dual".
        mask: The mask token (default: the tokenizer's).
    """
    loaded = load(SHIPPED if filter is None else Path(filter))
    stop = PredictedEnd() if foresee_end else EndOfText()
    blocks, unmask = FilterBlocks(loaded.size), FilterUnmasking(loaded, threshold)
    return Denoiser(blocks, Confidence(), unmask, cache_named(cache), stop, mask=mask)
