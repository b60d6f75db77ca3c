"""A small learned filter says which masks are final, and the canvas is cut where the text is
foreseen to end (Bao et al., "Learning to Parallel: Accelerating Diffusion Large Language Models via
Learnable Parallel Decoding", arXiv:2509.25188). `anydecode train filter` trains one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
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
    """Two layers over the confidences of a block; what is written counts as 1."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.hidden, self.hidden_bias, self.output, self.output_bias = (
            tensors[name].astype(np.float64) for name in _TENSORS
        )

    @property
    def size(self) -> int:
        """Positions of a block."""
        return int(self.hidden.shape[1])

    def __call__(self, confidences: np.ndarray) -> np.ndarray:
        """Chances float64 `[size]` that each position's prediction is final."""
        hidden = np.maximum(self.hidden @ confidences + self.hidden_bias, 0.0)
        result: np.ndarray = 1 / (1 + np.exp(-(self.output @ hidden + self.output_bias)))
        return result


@cache
def load(path: Path) -> Filter:
    """Raises `InvalidRequestError` where there is no such filter, or one of other shapes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        found = Filter(tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise InvalidRequestError(f"{path} is no filter for learn2pd: {error}") from None
    size = found.size
    if found.output.shape != (size, len(found.hidden)) or found.output_bias.shape != (size,):
        raise InvalidRequestError(f"{path} is no filter for learn2pd: its shapes do not fit")
    return found


class Filtered(UnmaskPolicy):
    """Masks that the filter calls final with a chance above `least`."""

    def __init__(self, filter: Filter, least: float) -> None:
        self.filter = filter
        self.least = least

    def opened(self, canvas: Canvas) -> None:
        if canvas.size is not None and canvas.size > self.filter.size:
            raise InvalidRequestError(
                f"this filter is for blocks of {self.filter.size}, the model has {canvas.size}"
            )

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        confidences = np.ones(self.filter.size)
        at = positions - canvas.block[0]
        confidences[at] = ranks
        chosen: np.ndarray = self.filter(confidences)[at] > self.least
        return chosen


class FilterBlocks(FixedBlocks):
    """Blocks of the filter's size; a canvas may be shorter, what it lacks counts as written."""

    def check(self, length: int) -> None:
        pass


class PredictedEnd(EndOfText):
    """Cuts behind a written end of text; else behind the mask where one is likeliest to be the
    favourite, if any mask's favourite is an end of text and some text stands before it."""

    def wants(self, canvas: Canvas) -> np.ndarray:
        return canvas.masks

    def cut(self, canvas: Canvas, predictions: Predictions) -> int | None:
        written = super().cut(canvas, predictions)
        if written is not None:
            return written
        ends = [
            position
            for position in canvas.masks.tolist()
            if position > canvas.memory["start"]
            and position in predictions
            and predictions.sequence.stops_at(predictions.facts(position).best)
        ]
        if not ends:
            return None
        likeliest = max(
            ends, key=lambda position: (predictions.facts(position).probability, -position)
        )
        return likeliest + 1 if likeliest + 1 < len(canvas) else None


@register(
    Card(
        "learn2pd",
        "diffusion",
        paper="Learning to Parallel (arXiv:2509.25188)",
        exactness="lossy",
        summary="A learned filter says what is final; the canvas ends where the text will.",
        needs=("diffusion model", "trained heads"),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the filter that ships was trained on tiny-diffusion; other models need their own",
            "the foreseen end of text itself stays on the canvas",
        ),
    )
)
def learn2pd(
    filter: str | Path | None = None,
    threshold: float = 0.96,
    foresee_end: bool = True,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Commits what `filter` (a safetensors file; default: the one that ships) calls final with a
    chance above `threshold`. `foresee_end` cuts the canvas where an end of text is predicted."""
    loaded = load(SHIPPED if filter is None else Path(filter))
    stop = PredictedEnd() if foresee_end else EndOfText()
    blocks, unmask = FilterBlocks(loaded.size), Filtered(loaded, threshold)
    return Denoiser(blocks, Confidence(), unmask, cache_named(cache), stop, mask=mask)
