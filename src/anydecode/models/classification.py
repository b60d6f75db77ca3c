"""The classifier of a cross-encoder: from the state of a pair of texts to its relevance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.limits import refusal
from anydecode.models.spec import ModelSpec
from anydecode.models.yes_no import JudgePrompt

_ERF = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: gelu(x),
    "silu": lambda x: x * sigmoid(x),
}
#: The functions of scores, by the last part of their names in torch.
_SCORES = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}


@dataclass(frozen=True, eq=False)
class Classifier:
    """output(norm(activation(dense(x)))), in double precision; all but `output` are optional.

    Attributes:
        output: `[labels, hidden_size]`.
        output_bias: `[labels]`.
        dense: `[hidden_size, hidden_size]`.
        dense_bias: `[hidden_size]`.
        norm: The weight of the layer norm after the activation, `[hidden_size]`.
        norm_eps: The epsilon of that norm.
        activation: "tanh", "relu", "gelu" or "silu".
        pooling: Which states it reads: "cls", "mean" or "last", see `Pooling`.
        score: The function of the logits: "sigmoid", "softmax" or "identity". One label has no
            softmax: its function is then the sigmoid.
        prompt: The prompt around a pair of texts; None: the tokenizer's special tokens.
    """

    output: np.ndarray
    output_bias: np.ndarray | None = None
    dense: np.ndarray | None = None
    dense_bias: np.ndarray | None = None
    norm: np.ndarray | None = None
    norm_eps: float = 1e-5
    activation: str = "tanh"
    pooling: str = "cls"
    score: str = "sigmoid"
    prompt: JudgePrompt | None = None

    @property
    def num_labels(self) -> int:
        """The number of labels."""
        return len(self.output)

    def logits(self, state: np.ndarray) -> np.ndarray:
        """The logit of each label, `[labels]`, of a pooled state `[hidden_size]`."""
        x = state.astype(np.float64)
        if self.dense is not None:
            x = self.dense @ x + (0.0 if self.dense_bias is None else self.dense_bias)
            x = _ACTIVATIONS[self.activation](x)
        if self.norm is not None:
            x = (x - x.mean()) / np.sqrt(x.var() + self.norm_eps) * self.norm
        y: np.ndarray = self.output @ x + (0.0 if self.output_bias is None else self.output_bias)
        return y

    def scores(self, state: np.ndarray) -> np.ndarray:
        """The score of each label, `[labels]`, of a pooled state `[hidden_size]`."""
        logits = self.logits(state)
        if self.score == "identity":
            return logits
        if self.num_labels == 1 or self.score == "sigmoid":
            return sigmoid(logits)
        weights = np.exp(logits - logits.max())
        normalised: np.ndarray = weights / weights.sum()
        return normalised


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function of x."""
    result: np.ndarray = x * 0.5 * (1.0 + _ERF(x / math.sqrt(2.0)))
    return result


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), in a form that does not overflow."""
    y: np.ndarray = 0.5 * (1.0 + np.tanh(0.5 * x))
    return y


def read_classifier(checkpoint: Checkpoint, spec: ModelSpec) -> Classifier | None:
    """The classifier of a checkpoint whose config has the key `classifier`; None if it has none.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape, or an option is not supported.
    """
    options = checkpoint.config.get("classifier")
    if not isinstance(options, Mapping):
        return None
    if options["activation"] not in _ACTIVATIONS:
        allowed = f"one of {', '.join(_ACTIVATIONS)}"
        raise refusal("classifier_activation", options["activation"], allowed)
    if options["pooling"] not in ("cls", "mean", "last"):
        raise refusal("classifier_pooling", options["pooling"], "cls or mean")
    hidden = spec.hidden_size
    output = _tensor(checkpoint, "output.weight")
    if output is None:
        raise CheckpointError(f"{checkpoint.name}: the classifier's tensors are missing")
    dense = _tensor(checkpoint, "dense.weight")
    classifier = Classifier(
        output,
        _tensor(checkpoint, "output.bias"),
        dense,
        _tensor(checkpoint, "dense.bias"),
        _tensor(checkpoint, "norm.weight"),
        spec.norm_eps,
        options["activation"],
        options["pooling"],
        _score(checkpoint.config, len(output)),
        JudgePrompt() if options.get("prompt") == "qwen3-reranker" else None,
    )
    shapes = {
        "output": (classifier.output, (len(output), hidden)),
        "output bias": (classifier.output_bias, (len(output),)),
        "dense": (dense, (hidden, hidden)),
        "dense bias": (classifier.dense_bias, (hidden,)),
        "norm": (classifier.norm, (hidden,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{checkpoint.name}: the classifier's {name} has shape {tensor.shape}, not {shape}"
            )
    return classifier


def _score(config: Mapping[str, Any], num_labels: int) -> str:
    """The function of the logits that a repository names, else the sigmoid of one label and the
    softmax of several."""
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid" if num_labels == 1 else "softmax"
    kind = str(name).rpartition(".")[2]
    if kind not in _SCORES:
        raise refusal("activation_fn", name, f"one of {', '.join(_SCORES)}")
    return _SCORES[kind]


def _tensor(checkpoint: Checkpoint, name: str) -> np.ndarray | None:
    if f"classifier.{name}" not in checkpoint.tensors:
        return None
    tensor = checkpoint.tensors[f"classifier.{name}"]
    if isinstance(tensor, Weight):
        from anydecode.kernels.formats import dequantize

        tensor = dequantize(tensor)
    return tensor.astype(np.float64)
