"""AutoDeco: two small heads say temperature and top-p for every token.

"The End of Manual Decoding: Towards Truly End-to-End Language Models", 2025, arXiv 2510.26697. The
temperature head reads the last layer's state; the top-p head reads that state, the temperature and
four figures of the distribution at that temperature.
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
from anydecode.sampling.candidates import Candidates, exponentials, largest
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import TopP

#: Temperatures lie between this and `HOTTEST`.
COLDEST, HOTTEST = 0.01, 2.0
#: What the top-p head sees besides the state: the temperature, then the largest probability, the
#: entropy in nats, the variance of the probabilities and the sum of the five largest.
NUM_FIGURES = 5

_TEMPERATURE, _TOP_P = "temp_head.mlp", "top_p_head.mlp"


@dataclass(frozen=True, eq=False)
class Head:
    """Linear, ReLU, linear to one number, sigmoid. `inner` float32 `[width, inputs]`, `bias`
    `[width]`, `outer` `[width]`, `offset` a number."""

    inner: np.ndarray
    bias: np.ndarray
    outer: np.ndarray
    offset: float

    def __call__(self, inputs: np.ndarray) -> float:
        # Row by row and in one order, so that a token's figures do not depend on the batch.
        middle = np.maximum((self.inner * inputs).sum(axis=1, dtype=np.float64) + self.bias, 0)
        total = float((middle * self.outer).sum()) + self.offset
        return float(1 / (1 + np.exp(-total)))


@dataclass(frozen=True, eq=False)
class Heads:
    """The two heads of one model."""

    temperature: Head
    top_p: Head

    def __call__(self, state: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
        """Temperature and top-p for a row: its state after the final norm, float32
        `[hidden_size]`, and the model's own logits."""
        temperature = max(HOTTEST * self.temperature(state), COLDEST)
        inputs = np.concatenate([state, figures(logits, temperature)], dtype=np.float32)
        return temperature, max(self.top_p(inputs), 1e-6)

    def check(self, hidden_size: int) -> None:
        """Raise `InvalidRequestError` unless the heads are for states of this size."""
        size = self.temperature.inner.shape[1]
        if size != hidden_size:
            raise InvalidRequestError(
                f"these autodeco heads are for states of {size} numbers; this model's have"
                f" {hidden_size}. `anydecode train autodeco` makes heads for it"
            )

    @staticmethod
    def of(tensors: Mapping[str, np.ndarray]) -> Heads:
        """From tensors by the authors' names (`temp_head.mlp.0.weight`, ...); others are ignored.
        Raises `CheckpointError` where one is missing or of the wrong shape."""
        heads: list[Head] = []
        for name, extra in ((_TEMPERATURE, 0), (_TOP_P, NUM_FIGURES)):
            found = []
            for part in ("0.weight", "0.bias", "2.weight", "2.bias"):
                key = f"{name}.{part}"
                if key not in tensors:
                    raise CheckpointError(f"autodeco heads: there is no tensor {key}")
                found.append(np.asarray(tensors[key], np.float32))
            inner, bias, outer, offset = found
            width = inner.shape[0]
            size = heads[0].inner.shape[1] if heads else inner.shape[-1]
            right = ((width, size + extra), (width,), (1, width), (1,))
            if tuple(array.shape for array in found) != right:
                raise CheckpointError(f"autodeco heads: the tensors of {name} do not fit together")
            heads.append(Head(inner, bias, outer[0], float(offset[0])))
        return Heads(*heads)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Heads:
        """From a safetensors file. Raises `CheckpointError` in one line."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(os.fspath(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"autodeco heads {path}: {error}") from None
        return Heads.of({name: tensor.float().numpy() for name, tensor in tensors.items()})

    def tensors(self) -> dict[str, np.ndarray]:
        """By the names that `of` reads."""
        named = {}
        for name, head in ((_TEMPERATURE, self.temperature), (_TOP_P, self.top_p)):
            named[f"{name}.0.weight"] = head.inner
            named[f"{name}.0.bias"] = head.bias
            named[f"{name}.2.weight"] = head.outer[None]
            named[f"{name}.2.bias"] = np.array([head.offset], np.float32)
        return named

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        """Into a safetensors file, in half precision; `notes` go into its header."""
        from safetensors.numpy import save_file

        halves = {name: array.astype(np.float16) for name, array in self.tensors().items()}
        save_file(halves, os.fspath(path), metadata=dict(notes or {}))


def figures(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float32 `[NUM_FIGURES]` of softmax(logits / temperature)."""
    weights, total = exponentials(logits / np.float32(temperature))
    p = weights.astype(np.float64) / total
    held = p[p > 0]
    entropy = -float((held * np.log(held)).sum())
    top = float(p[largest(p, 5)].sum())
    return np.array([temperature, p.max(), entropy, p.var(ddof=1), top], np.float32)


class AutoDeco(LogitsProcessor):
    """Divides by the row's own temperature, then keeps the row's own nucleus. Stands last, behind a
    temperature of 1."""

    stateful = True
    observes_hidden = True

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.said: tuple[float, float] | None = None  # temperature and top-p of the row last seen

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:
        self.said = self.heads(state, logits)

    def apply(self, candidates: Candidates) -> Candidates:
        if self.said is None:  # a drafter's row, before the model has shown any of its own
            return candidates
        temperature, top_p = self.said
        scores = candidates.writable()
        scores /= np.float32(temperature)
        return TopP(top_p).apply(candidates) if top_p < 1 else candidates

    def fork(self) -> AutoDeco:
        branch = AutoDeco(self.heads)
        branch.said = self.said
        return branch


@cache
def default_heads() -> Heads:
    """Heads for the default model, trained on its own text (`anydecode train autodeco`)."""
    with resources.as_file(resources.files("anydecode") / "assets" / "autodeco.safetensors") as at:
        return Heads.load(at)


@register(
    Card(
        "autodeco",
        "sampling",
        paper="The End of Manual Decoding: Towards Truly End-to-End Language Models"
        " (arXiv:2510.26697)",
        exactness="lossy",
        summary="Small heads on the last layer say temperature and top-p for every token.",
        needs=("trained heads",),
        works_with=WORKS_WITH,
        deviations=(
            "the heads that come with the package are 64 wide instead of 256, in half precision,"
            " and for the default model alone; any width is loaded",
            "those heads are a proof of the seam, without a gain: trained on 10,005 tokens of the"
            " model's own answers (the likeliest of three, drawn at temperature 1), they give 2,489"
            " held-out tokens 1.9674 nats each; temperature 1 gives 1.9668 and the best fixed one,"
            " 0.95, 1.9648 (standard error of the difference 0.0020)",
            "trained on every token alike unless weighted=True asks for the authors' weights, which"
            " favour what the model says anyway and so make temperatures too low for likelihood",
            "in training, tokens beyond the 1,024 likeliest count as the end of the distribution",
            "the temperature is at least 0.01, at inference as well as in training",
            "the figures of the distribution are those of the model's own logits, before penalties"
            " and constraint; temperature and top-p act after them",
        ),
    )
)
def autodeco(heads: str | Path | Heads | None = None) -> SamplerPreset:
    """`heads`: a safetensors file, or heads; by default those of the default model."""
    found = default_heads() if heads is None else heads
    if isinstance(found, str | Path):
        found = Heads.load(found)
    return SamplerPreset("autodeco", {"autodeco": found})
