"""AutoDeco: two small heads predict temperature and top-p for every token.

"The End of Manual Decoding: Towards Truly End-to-End Language Models", 2025, arXiv 2510.26697. The
temperature head reads the last hidden state; the top-p head reads that state, the temperature and
four statistics of the distribution at that temperature.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Candidates, largest
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import TopP

#: Bounds of the predicted temperature.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
#: Number of inputs of the top-p head besides the hidden state: the temperature, the largest
#: probability, the entropy in nats, the variance of the probabilities, the sum of the five largest.
NUM_FEATURES = 5

_TEMPERATURE, _TOP_P = "temp_head.mlp", "top_p_head.mlp"


@dataclass(frozen=True, eq=False)
class Head:
    """A two-layer perceptron with one output: linear, ReLU, linear, sigmoid.

    Args:
        inner: Weights of the first layer, float32 `[width, inputs]`.
        bias: Its bias, float32 `[width]`.
        outer: Weights of the second layer, float32 `[width]`.
        offset: Its bias.
    """

    inner: np.ndarray
    bias: np.ndarray
    outer: np.ndarray
    offset: float

    def __call__(self, inputs: np.ndarray) -> float:
        # Row by row and in a fixed order, so that the results do not depend on the batch.
        middle = np.maximum((self.inner * inputs).sum(axis=1, dtype=np.float64) + self.bias, 0)
        total = float((middle * self.outer).sum()) + self.offset
        return float(1 / (1 + np.exp(-total)))


@dataclass(frozen=True, eq=False)
class Heads:
    """The two heads of one model."""

    temperature: Head
    top_p: Head

    def __call__(self, state: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
        """Predict temperature and top-p for one row.

        Args:
            state: Last hidden state after the final norm, float32 `[hidden_size]`.
            logits: The model's unmodified logits, float32 `[vocab_size]`.
        """
        temperature = max(MAX_TEMPERATURE * self.temperature(state), MIN_TEMPERATURE)
        inputs = np.concatenate([state, features(logits, temperature)], dtype=np.float32)
        return temperature, max(self.top_p(inputs), 1e-6)

    def check(self, hidden_size: int) -> None:
        """Raise `InvalidRequestError` unless the heads are for hidden states of this size."""
        size = self.temperature.inner.shape[1]
        if size != hidden_size:
            raise InvalidRequestError(
                f"these autodeco heads are for states of {size} numbers; this model's have"
                f" {hidden_size}. `anydecode train autodeco` makes heads for it"
            )

    @staticmethod
    def of(tensors: Mapping[str, np.ndarray]) -> Heads:
        """Create heads from tensors with the authors' names (`temp_head.mlp.0.weight`, ...); other
        tensors are ignored. Raises `CheckpointError` if one is missing or has a wrong shape."""
        heads: list[Head] = []
        for name, extra in ((_TEMPERATURE, 0), (_TOP_P, NUM_FEATURES)):
            found = []
            for part in ("0.weight", "0.bias", "2.weight", "2.bias"):
                key = f"{name}.{part}"
                if key not in tensors:
                    raise CheckpointError(f"autodeco heads: there is no tensor {key}")
                found.append(np.asarray(tensors[key], np.float32))
            inner, bias, outer, offset = found
            width = inner.shape[0]
            size = heads[0].inner.shape[1] if heads else inner.shape[-1]
            expected = ((width, size + extra), (width,), (1, width), (1,))
            if tuple(array.shape for array in found) != expected:
                raise CheckpointError(f"autodeco heads: the tensors of {name} do not fit together")
            heads.append(Head(inner, bias, outer[0], float(offset[0])))
        return Heads(*heads)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Heads:
        """Load heads from a safetensors file. Raises `CheckpointError`."""
        from anydecode.models.tensor_file import read_tensors

        return Heads.of(read_tensors(path, "autodeco heads")[0])

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors by the names that `of` reads."""
        named = {}
        for name, head in ((_TEMPERATURE, self.temperature), (_TOP_P, self.top_p)):
            named[f"{name}.0.weight"] = head.inner
            named[f"{name}.0.bias"] = head.bias
            named[f"{name}.2.weight"] = head.outer[None]
            named[f"{name}.2.bias"] = np.array([head.offset], np.float32)
        return named

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file in half precision, with `notes` in its header."""
        from safetensors.numpy import save_file

        halves = {name: array.astype(np.float16) for name, array in self.tensors().items()}
        save_file(halves, os.fspath(path), metadata=dict(notes or {}))


def features(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float32 `[NUM_FEATURES]` of softmax(logits / temperature)."""
    weights, total = exponentials(logits / np.float32(temperature))
    p = weights.astype(np.float64) / total
    positive = p[p > 0]
    entropy = -float((positive * np.log(positive)).sum())
    top = float(p[largest(p, 5)].sum())
    return np.array([temperature, p.max(), entropy, p.var(ddof=1), top], np.float32)


class AutoDeco(LogitsProcessor):
    """Divides the logits by the temperature predicted for the row, then applies the predicted
    top-p. It is the last processor, after a temperature of 1."""

    is_stateful = True
    observes_hidden = True

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.parameters: tuple[float, float] | None = None  # temperature, top-p of the current row

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:
        self.parameters = self.heads(state, logits)

    def apply(self, candidates: Candidates) -> Candidates:
        if self.parameters is None:  # a drafter's row, before any row of the target
            return candidates
        temperature, top_p = self.parameters
        scores = candidates.writable()
        scores /= np.float32(temperature)
        return TopP(top_p).apply(candidates) if top_p < 1 else candidates

    def fork(self) -> AutoDeco:
        branch = AutoDeco(self.heads)
        branch.parameters = self.parameters
        return branch


@cache
def default_heads() -> Heads:
    """The heads for the default model, trained on its own text (`anydecode train autodeco`)."""
    with resources.as_file(resources.files("anydecode") / "assets" / "autodeco.safetensors") as at:
        return Heads.load(at)


@register(
    Card(
        "autodeco",
        "sampling",
        paper="The End of Manual Decoding: Towards Truly End-to-End Language Models"
        " (arXiv:2510.26697)",
        exactness="lossy",
        summary="Small heads on the last layer predict temperature and top-p for every token.",
        needs=("trained heads",),
        works_with=WORKS_WITH,
        missing=("heads that are better than a fixed temperature: those in the package are not",),
        deviations=(
            "the heads in the package are 64 wide instead of 256, in half precision, and for the"
            " default model only; heads of any width can be loaded",
            "those heads demonstrate the method without a gain: trained on 10,005 tokens of the"
            " model's own answers (the likeliest of three, sampled at temperature 1), they give"
            " 2,489 held-out tokens 1.9674 nats each; temperature 1 gives 1.9668 and the best fixed"
            " temperature, 0.95, gives 1.9648 (standard error of the difference 0.0020)",
            "training weighs all tokens equally; weighted=True uses the authors' weights, which"
            " favour tokens that are probable anyway and give temperatures too low for likelihood",
            "in training, tokens beyond the 1,024 likeliest count as the end of the distribution",
            "the temperature is at least 0.01, in inference and in training",
            "the statistics of the distribution are those of the model's unmodified logits, before"
            " penalties and constraint; temperature and top-p are applied after them",
        ),
    )
)
def autodeco(heads: str | Path | Heads | None = None) -> SamplerPreset:
    """Predicted temperature and top-p.

    Args:
        heads: A safetensors file, or `Heads`; by default those for the default model.
    """
    found = default_heads() if heads is None else heads
    if isinstance(found, str | Path):
        found = Heads.load(found)
    return SamplerPreset("autodeco", {"autodeco": found})
