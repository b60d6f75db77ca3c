"""Learn2PD (Bao et al., "Learning to Parallel: Accelerating Diffusion Large Language Models via
Learnable Parallel Decoding", arXiv:2509.25188).

A small trained filter predicts from the confidences of a block which predictions are final; these
are unmasked. The canvas is cut where an end of text is predicted. `anydecode train filter` trains a
filter.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.tensor_file import read_tensors
from anydecode.scoring.sequence import Sequence

SHIPPED = Path(__file__).parents[2] / "assets" / "tiny-diffusion" / "learn2pd.safetensors"
_TENSORS = ("hidden.weight", "hidden.bias", "output.weight", "output.bias")
_FACTS = ("num_layers", "vocab_size", "mask_embedding")
#: The numbers of the mask's embedding that tell models of one shape apart, and how far those of
#: one model in two formats may be apart, as a share of their norm.
_NUM_NUMBERS, _TOLERANCE = 64, 0.1
#: The caches whose passes can predict all masks.
_WHOLE = ("none", "prefix", "elastic")


class Filter:
    """A network of two layers over the confidences of a block; unmasked positions count as 1.

    Args:
        tensors: The weights and biases of both layers.
        model: `model_facts` of the model that it was trained for.
    """

    def __init__(self, tensors: dict[str, np.ndarray], model: dict[str, Any]) -> None:
        self.model = model
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


def model_facts(model: Any, mask: int) -> dict[str, Any]:
    """What tells the model apart from others, as JSON: its shape and the start of the embedding of
    the mask token."""
    embedding = model.embed(np.array([mask], np.int32))[0, :_NUM_NUMBERS]
    numbers = [round(float(number), 5) for number in embedding]
    return {
        "num_layers": model.spec.num_layers,
        "vocab_size": model.spec.vocab_size,
        "mask_embedding": numbers,
    }


def is_same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `model_facts` are those of one model, perhaps in two formats."""
    if any(one[name] != other[name] for name in ("num_layers", "vocab_size")):
        return False
    first, second = (np.array(facts["mask_embedding"]) for facts in (one, other))
    return first.shape == second.shape and bool(
        np.linalg.norm(first - second) <= _TOLERANCE * np.linalg.norm(second)
    )


def load(path: Path) -> Filter:
    """Load a filter from a safetensors file, again if the file has changed.

    Raises:
        CheckpointError: There is no such file, or its tensors are not those of a filter.
    """
    try:
        written = path.stat().st_mtime_ns
    except OSError:  # for which reading it raises the error
        written = 0
    return _load(path, written)


@lru_cache(maxsize=16)
def _load(path: Path, written: int) -> Filter:
    """The filter in a file that was last written then."""
    tensors, metadata = read_tensors(path, "filter for learn2pd", _TENSORS, np.float64)
    hidden = tensors["hidden.weight"]
    width, size = hidden.shape if hidden.ndim == 2 else (0, 0)
    expected = ((width, size), (width,), (size, width), (size,))
    if not width * size or tuple(tensors[name].shape for name in _TENSORS) != expected:
        raise CheckpointError(f"filter for learn2pd {path}: the tensors do not fit together")
    try:
        model = json.loads(metadata["learn2pd"])["model"]
        facts = {name: model[name] for name in _FACTS}
        facts["mask_embedding"] = np.array(facts["mask_embedding"], np.float64)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise CheckpointError(
            f"filter for learn2pd {path}: does not say for which model it was trained"
        ) from None
    return Filter(tensors, facts)


class FilterUnmasking(UnmaskPolicy):
    """Unmasks the masks that are final with a probability above `threshold`."""

    def __init__(self, filter: Filter, threshold: float) -> None:
        self.filter = filter
        self.threshold = threshold

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        confidences = np.ones(self.filter.size)
        offsets = positions - canvas.block[0]
        confidences[offsets] = ranks
        chosen: np.ndarray = self.filter(confidences)[offsets] > self.threshold
        return chosen


class FilterDenoiser(Denoiser):
    """Refuses models that the filter was not trained for."""

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        mask = self.mask_token(sequence)
        assert mask is not None and isinstance(self.unmask, FilterUnmasking)
        if not is_same_model(self.unmask.filter.model, model_facts(sequence.model(), mask)):
            raise InvalidRequestError(
                "this filter was trained for another model: train one for this model with"
                " `anydecode train filter --model MODEL`, and give it as filter=FILE"
            )


class FilterBlocks(FixedBlocks):
    """Blocks of the filter's size. If the canvas is shorter, the rest counts as unmasked."""

    def check_length(self, length: int) -> None:
        pass

    def check_model(self, block_size: int | None) -> None:
        if block_size not in (None, self.size):
            raise InvalidRequestError(
                f"this filter is for blocks of {self.size} positions, but the model's have"
                f" {block_size}"
            )


class PredictedEnd(EndOfText):
    """Cuts the canvas after a committed end of text, or else after a predicted one.

    An end of text is predicted where it is the most likely token of a mask that is not the first
    position of the answer. Of several the most probable one counts.

    Args:
        is_local: Whether only masks of the open block count, as in a model with blocks.
    """

    def __init__(self, is_local: bool = False) -> None:
        self.is_local = is_local

    def extra_positions(self, canvas: Canvas) -> np.ndarray:
        if self.is_local or canvas.block_size:
            return super().extra_positions(canvas)
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
            "the included filter is for tiny-diffusion; `anydecode train filter` makes those of"
            " other models",
            "the predicted end of text itself stays on the canvas",
            "the end is predicted within the open block in models with blocks, and with caches that"
            " do not compute what is behind it",
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
        filter: The filter of this model, a safetensors file of `anydecode train filter` (default:
            the included one, for tiny-diffusion).
        threshold: Masks that are final with a probability above it are unmasked.
        foresee_end: Cut the canvas where an end of text is predicted.
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    loaded = load(SHIPPED if filter is None else Path(filter))
    stop = PredictedEnd(cache not in _WHOLE) if foresee_end else EndOfText()
    blocks, unmask = FilterBlocks(loaded.size), FilterUnmasking(loaded, threshold)
    return FilterDenoiser(blocks, Confidence(), unmask, cache_named(cache), stop, mask=mask)
